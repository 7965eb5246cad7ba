"""`rlhf chat`: talk to the model of a run, or to any model folder, in a terminal or through a pipe."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rlhf.cli.options import Options, shared
from rlhf.config import Config, ModelConfig
from rlhf.errors import ModelError, RunError

if TYPE_CHECKING:
    from rlhf.data.encoding import PromptFormat
    from rlhf.data.rows import Message

Show = Callable[[str], None]

_SAID = {
    "/help": "/help   shows this\n/reset  forgets the conversation\n/exit   leaves, as Ctrl-D does",
    "/reset": "forgotten",
}


@shared("accelerator", "precision", "seed", "debug")
def chat(
    context: typer.Context,
    options: Options,
    run_or_model: Annotated[Path, typer.Argument(help="Folder of a run, or of a model.", metavar="RUN_OR_MODEL_DIR")],
    stage: Annotated[
        Literal["sft", "dpo", "ppo"] | None, typer.Option(help="Which model of a run; without it, the last one.")
    ] = None,
    ema: Annotated[
        bool, typer.Option("--ema", help="The moving average of the policy's weights (ppo.ema), not the last ones.")
    ] = False,
    temperature: Annotated[float, typer.Option(min=0, help="0: always the most likely token.", metavar="T")] = 0.7,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.", metavar="N")] = 256,
    memory: Annotated[
        bool | None,
        typer.Option(
            help="Whether an answer sees the turns before it; without this, if the model was trained on conversations."
        ),
    ] = None,
) -> None:
    """Talk to a trained model.

    In a pipe, every line is a prompt of its own: [cyan]echo "Where does the bee live?" | rlhf chat runs/default[/].
    """
    from rich.text import Text

    from rlhf.metrics.progress import console

    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # bytes that are no text are no reason to stop
    folder = model_folder(run_or_model, stage, ema=ema)
    interactive = sys.stdin.isatty()
    with console.status(Text(f"loading {folder}")) if interactive else nullcontext():
        model = ChatModel(folder, options, temperature=temperature, max_tokens=max_tokens)
    if interactive:
        _converse(model, model.converses if memory is None else memory, f"{folder} on {model.accelerator.name}")
    else:
        for line in sys.stdin:
            if line.strip():
                _answer(model, [("user", line.strip())])


def model_folder(path: Path, stage: Literal["sft", "dpo", "ppo"] | None = None, *, ema: bool = False) -> Path:
    """The model to talk to: of a run the one of `stage`, or of its last finished stage; else `path` itself.

    Args:
        ema: the moving average of PPO's policy.

    Raises:
        RunError: the run has no such model.
        ModelError: `path` is neither a run nor a folder.
    """
    from rlhf.run import RunDirectory
    from rlhf.sharing import ADAPTER

    run = RunDirectory(path)
    for folder in (path, *path.parents[:2]):  # of a run, of its stage, of the stage's model
        with suppress(RunError):  # a living process writes there; what is complete may be talked to
            RunDirectory(folder).recover()
    if ema:
        return _average(path, stage)
    if run.description.is_file():
        wanted = [run.stage(stage)] if stage else [run.stage("ppo"), run.stage("dpo"), run.stage("sft")]
        for candidate in wanted:
            if candidate.done and not candidate.model.exists() and (candidate.path / ADAPTER).is_dir():
                raise RunError(
                    f"{path}: its {candidate.name} stage has left an adapter alone (lora.save); "
                    "merge it with peft and name that folder, or give --stage sft"
                )
            if candidate.done:
                return candidate.model
        *others, last = (candidate.name for candidate in wanted)
        names = f"{', '.join(others)} or {last}" if others else last
        raise RunError(f"{path}: has no finished {names} stage; finish it with --resume, or name a model folder")
    if path.is_file():
        raise ModelError(f"{path}: is a file; name the folder of a run or of a model")
    if not path.is_dir():
        raise ModelError(f"{path}: no such folder; name a run (it holds run.json) or a model (it holds config.json)")
    if (path / "stage.json").is_file():
        return path / "model"  # the folder of a run's stage
    if stage:
        raise RunError(f"{path}: --stage chooses a model of a run, and there is no run.json here; leave it out")
    return path


def _average(path: Path, stage: Literal["sft", "dpo", "ppo"] | None) -> Path:
    """The moving average that PPO has left in the run at `path`, or in the folder of its stage."""
    from rlhf.sharing import ADAPTER
    from rlhf.stage_directory import AVERAGE, StageDirectory

    if stage not in (None, "ppo"):
        raise RunError("--ema: of PPO's policy alone a run has an average; leave --stage out")
    ppo = StageDirectory(path / "ppo" if (path / "run.json").is_file() else path, "ppo")
    if (ppo.path / f"{ADAPTER}{AVERAGE}").is_dir() and not ppo.average.exists():
        raise RunError(
            f"{path}: the ppo stage has left the average as an adapter alone (lora.save); "
            "merge it with peft and name that folder without --ema"
        )
    if not ppo.done or not ppo.average.is_dir():
        raise RunError(f"{path}: holds no average of a finished ppo stage; train with ppo.ema, or leave --ema out")
    return ppo.average


def trained_format(folder: Path) -> PromptFormat | None:
    """How prompts were written in the training that left the model in `folder`; None where no stage left it."""
    from rlhf.run import read_json

    summary = folder.parent / "stage.json"
    if folder.name not in ("model", "model-ema") or not summary.is_file():
        return None
    found: PromptFormat | None = read_json(summary).get("prompt_format")
    return found


class ChatModel:
    """A causal language model and its tokenizer on the chosen accelerator, ready to answer."""

    def __init__(self, folder: Path, options: Options, *, temperature: float, max_tokens: int) -> None:
        from rlhf import launch
        from rlhf.models.folder import check_model_folder

        config: Config = options.load()
        check_model_folder(str(folder))
        selection = launch.select(config, options.accelerator)
        from rlhf.models.attention import choose_attention
        from rlhf.models.loading import load_causal_lm, load_model_tokenizer
        from rlhf.models.placement import place
        from rlhf.models.scalar_head import SUFFIX
        from rlhf.models.support import max_positions, read_config
        from rlhf.models.tokenizers import end_tokens
        from rlhf.models.weights import into

        self.accelerator = selection.create()
        device = self.accelerator.bind(0)
        self.accelerator.seed(config.seed)
        source = ModelConfig(path=str(folder))
        for architecture in read_config(str(folder), source).architectures or ():
            if architecture.endswith(("ForSequenceClassification", SUFFIX)):
                raise ModelError(f"{folder}: is a reward model, which scores texts and writes none; name another model")
        self.tokenizer, _ = load_model_tokenizer(source)
        attention = choose_attention(self.accelerator, str(folder), source).name
        dtype = self.accelerator.precision(config.precision).dtype
        model = load_causal_lm(source, self.tokenizer, attention=attention, put=into(dtype, device))
        self.model: Any = place(model, device, dtype).eval()
        self.prompt_format = trained_format(folder) or ("template" if self.tokenizer.chat_template else "plain")
        self.end_ids = end_tokens(self.tokenizer, self.model.generation_config)
        self._room = max_positions(self.model.config) or 1_000_000
        self.sampling = {"do_sample": temperature > 0, **({"temperature": temperature} if temperature else {})}
        self.max_tokens = max_tokens

    @property
    def converses(self) -> bool:
        """Whether the model was trained on conversations rather than on lone texts."""
        return self.prompt_format != "plain"

    def reply(self, turns: Sequence[tuple[str, str]], show: Show) -> str:
        """Answer a conversation of (role, text); `show` gets the answer piece by piece.

        The oldest turns are left out where the model cannot hold them all.

        Raises:
            ModelError: the last message alone is too long.
        """
        import torch

        ids = self._prompt(turns)
        prompt = torch.tensor([ids], device=self.accelerator.device())
        stream = _Stream(self.tokenizer, show)
        self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=min(self.max_tokens, self._room - len(ids)),
            eos_token_id=self.end_ids,
            pad_token_id=self.tokenizer.pad_token_id,
            streamer=stream,
            use_cache=True,
            **self.sampling,
        )
        return stream.shown

    def _prompt(self, turns: Sequence[tuple[str, str]]) -> list[int]:
        from rlhf.data.encoding import encode_conversation
        from rlhf.data.rows import Message

        messages: list[Message] = [Message(role, text) for role, text in turns]
        while True:
            ids = encode_conversation(self.tokenizer, messages, self.prompt_format)
            if len(ids) + min(self.max_tokens, self._room // 4) <= self._room:
                return ids
            if len(messages) == 1:
                raise ModelError(
                    f"a message of {len(ids)} tokens is too long for this model ({self._room}); shorten it"
                )
            messages = messages[2:]


class _Stream:
    """Receives tokens from `generate` and shows their text as soon as it is certain."""

    def __init__(self, tokenizer: Any, show: Show) -> None:
        self._tokenizer, self._show = tokenizer, show
        self._ids: list[int] | None = None  # None until the prompt, which comes first, has passed
        self.shown = ""

    def put(self, value: Any) -> None:
        if self._ids is None:
            self._ids = []
            return
        self._ids.extend(value.flatten().tolist())
        text = self._text()
        if not text.endswith("\ufffd"):  # the rest of a character comes with the next token
            self._emit(text)

    def end(self) -> None:
        self._emit(self._text())

    def _text(self) -> str:
        text: str = self._tokenizer.decode(self._ids or [], skip_special_tokens=True)
        return text.lstrip()

    def _emit(self, text: str) -> None:
        self._show(text[len(self.shown) :])
        self.shown = text


def _answer(model: ChatModel, turns: Sequence[tuple[str, str]]) -> str:
    text = model.reply(turns, lambda piece: print(piece, end="", flush=True))
    print(flush=True)
    return text


def _converse(model: ChatModel, memory: bool, title: str) -> None:
    import readline  # noqa: F401  # gives input() editing and history

    from rich.text import Text

    from rlhf.metrics.progress import console

    console.print(Text(title, style="bold"), soft_wrap=True)
    remembers = "" if memory else "each message is answered on its own (--memory changes that); "
    console.print(f"[dim]{remembers}/help shows the commands[/]\n")
    turns: list[tuple[str, str]] = []
    while True:
        try:
            message = input("you    ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if command := re.match(r"/\w+(?!\S)", message):
            if command[0] == "/exit":
                return
            if command[0] == "/reset":
                turns.clear()
            said = _SAID.get(command[0], f"no such command: {command[0]}; /help shows them")
            console.print(Text(f"{said}\n", style="dim"), soft_wrap=True)
            continue
        if not message:
            continue
        turns = [*(turns if memory else []), ("user", message)]
        print("model  ", end="", flush=True)
        try:
            turns.append(("assistant", _answer(model, turns)))
        except KeyboardInterrupt:  # stops this answer only
            turns.pop()
            print(" ...")
        except ModelError as error:
            turns.pop()
            print(f"({error})")
        print()
