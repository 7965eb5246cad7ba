"""`rlhf chat`: talk to the model of a run, or to any model folder, in a terminal or through a pipe."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from rlhf.cli.options import Options, PolicyStage, RunOrModel, UseAverage, shared
from rlhf.cli.tables import print_line
from rlhf.data.prompt_encoding import encode_conversation
from rlhf.data.records import Message
from rlhf.data.text_stream import TextStream
from rlhf.errors import ModelError
from rlhf.evaluation.models import EvaluationDevice, find_base_model, load_language_model, model_folder
from rlhf.reporting.console import console
from rlhf.utils import signals

Show = Callable[[str], None]

_NOTICES = {
    "/help": "/help   shows this\n/reset  forgets the conversation\n/exit   exits, as does Ctrl-D",
    "/reset": "conversation forgotten",
}


@shared("accelerator", "precision", "seed", "debug")
def chat(
    options: Options,
    run_or_model: RunOrModel,
    stage: PolicyStage = None,
    ema: UseAverage = False,
    temperature: Annotated[
        float, typer.Option(min=0, help="Sampling temperature; 0: always the most likely token.", metavar="T")
    ] = 0.7,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest completion, in tokens.", metavar="N")] = 256,
    memory: Annotated[
        bool | None,
        typer.Option(
            metavar="",
            help="Keep earlier turns in the context. Default: on if the model was trained on conversations.",
        ),
    ] = None,
) -> None:
    """Talk to a trained model.

    In a pipe, every line is a separate prompt: [cyan]echo "Where does the bee live?" | rlhf chat runs/default[/].
    """
    folder = model_folder(run_or_model, stage, ema=ema)
    interactive = sys.stdin.isatty()
    with console.status(Text(f"loading {folder}")) if interactive else nullcontext():
        model = ChatModel(folder, options, temperature=temperature, max_tokens=max_tokens)
    if interactive:
        title = f"{folder} on {model.writer.device.accelerator.name}"
        _converse(model, model.writer.converses if memory is None else memory, title)
    else:
        if str(folder) != run_or_model:
            print(f"rlhf: note: the model is {folder}", file=sys.stderr)
        for line in sys.stdin:
            if line.strip():
                _answer(model, [("user", line.strip())])


class ChatModel:
    """A causal language model and its tokenizer on the chosen accelerator, ready to answer."""

    def __init__(self, folder: Path, options: Options, *, temperature: float, max_tokens: int) -> None:
        config = options.load()
        find_base_model(folder)  # reports a wrong folder before slow imports
        device = EvaluationDevice.select(config, options.accelerator)
        self.writer = load_language_model(folder, config, device)
        self.sampling = {"do_sample": temperature > 0, **({"temperature": temperature} if temperature else {})}
        self.max_tokens = max_tokens

    def reply(self, turns: Sequence[tuple[str, str]], show: Show) -> str:
        """Reply to a conversation of (role, text); `show` gets the reply piece by piece.

        The oldest turns are left out if the model's context is too short for all.

        Raises:
            ModelError: the last message alone is too long.
        """
        import torch

        ids = self._prompt(turns)
        prompt = torch.tensor([ids], device=self.writer.device.accelerator.device())
        stream = _Stream(self.writer.tokenizer, show)
        self.writer.module.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=min(self.max_tokens, self.writer.max_length - len(ids)),
            eos_token_id=self.writer.end_ids,
            pad_token_id=self.writer.tokenizer.pad_token_id,
            streamer=stream,
            use_cache=True,
            **self.sampling,
        )
        return stream.shown

    def _prompt(self, turns: Sequence[tuple[str, str]]) -> list[int]:
        messages = [Message(role, text) for role, text in turns]
        while True:
            ids = encode_conversation(self.writer.tokenizer, messages, self.writer.prompt_format)
            if len(ids) + min(self.max_tokens, self.writer.max_length // 4) <= self.writer.max_length:
                return ids
            if len(messages) == 1:
                raise ModelError(
                    f"a message of {len(ids)} tokens is too long for this model ({self.writer.max_length}); shorten it"
                )
            messages = messages[2:]


class _Stream:
    """Receives tokens from `generate` and shows their text as soon as it is certain."""

    def __init__(self, tokenizer: Any, show: Show) -> None:
        self._tokenizer, self._show = tokenizer, show
        self._text: TextStream | None = None  # before the prompt, which comes first
        self.shown = ""

    def put(self, value: Any) -> None:
        ids = value.flatten().tolist()
        if self._text is None:
            self._text = TextStream(self._tokenizer, ids)
            return
        for token in ids:
            self._emit(self._text.add(token))

    def end(self) -> None:
        if self._text:
            self._emit(self._text.end())

    def _emit(self, piece: str) -> None:
        piece = piece if self.shown else piece.lstrip()
        self._show(piece)
        self.shown += piece


def _answer(model: ChatModel, turns: Sequence[tuple[str, str]]) -> str:
    text = model.reply(turns, lambda piece: print(piece, end="", flush=True))
    print(flush=True)
    return text


def _converse(model: ChatModel, memory: bool, title: str) -> None:
    import readline  # noqa: F401  # gives input() editing and history

    print_line((title, "bold"))
    scope = "" if memory else "the model sees only your last message (--memory changes that); "
    print_line((f"{scope}/help shows the commands\n", "dim"))
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
            notice = _NOTICES.get(command[0], f"no such command: {command[0]}; /help shows them")
            print_line((f"{notice}\n", "dim"))
            continue
        if not message:
            continue
        turns = [*(turns if memory else []), ("user", message)]
        print("model  ", end="", flush=True)
        try:
            turns.append(("assistant", _answer(model, turns)))
        except KeyboardInterrupt:  # Ctrl-C stops this answer only
            signals.continue_after_ctrl_c()
            turns.pop()
            print(" ...")
        except ModelError as error:
            turns.pop()
            print(f"({error})")
        print()
