"""`rlhf chat` finds the model of a run and answers, line by line through a pipe."""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from rlhf.cli.app import app
from rlhf.cli.chat import ChatModel, Show, _converse
from rlhf.cli.options import Options
from rlhf.config.schema import Config
from rlhf.errors import ModelError, RunError
from rlhf.evaluation.models import model_folder
from rlhf.runs.directory import RunDirectory
from rlhf.utils.file_lock import lock_folder
from tests.helpers import llama


@pytest.fixture
def finished_run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "run")
    with run.open_for(Config()):
        for name in ("sft", "reward", "ppo"):
            run.stage(name).model.mkdir(parents=True)
            run.stage(name).finish({"stage": name})
    return run


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with random weights and a tokenizer of a few words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "<pad>", "<eos>", "hello", "moo", "hive"]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>"
    )
    folder = tmp_path_factory.mktemp("model")
    model = llama(len(words), tie_word_embeddings=False, max_position_embeddings=16, eos_token_id=2, pad_token_id=1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def chat_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch, precision: str = "fp32", max_tokens: int = 4
) -> ChatModel:
    monkeypatch.setenv("RLHF_ACCELERATOR", "cpu")  # also restores what the model exports
    return ChatModel(folder, Options(precision=precision), temperature=0, max_tokens=max_tokens)


@pytest.fixture
def model(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> ChatModel:
    return chat_model(tiny_model, monkeypatch)


def test_model_of_a_run_is_that_of_a_finished_stage(finished_run: RunDirectory) -> None:
    sft = finished_run.stage("sft")
    assert model_folder(finished_run.path) == finished_run.stage("ppo").model
    assert model_folder(sft.path) == sft.model
    with lock_folder(finished_run.path):  # another process writes to the run
        assert model_folder(finished_run.path, "sft") == sft.model


@pytest.mark.parametrize("named", [".", "ppo", "ppo/model"])
def test_backup_of_a_killed_run_is_restored(finished_run: RunDirectory, named: str) -> None:
    finished_run.create_backup(["sft", "reward", "ppo"])  # and then the process died
    assert model_folder(finished_run.path / named) == finished_run.stage("ppo").model
    assert finished_run.stage("ppo").model.is_dir()


def test_backend_is_chosen_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    script = f"""
import sys
from rlhf.engine import select as selection
from rlhf.cli.app import app
def select(*arguments):
    print(sorted({{"torch", "transformers", "deepspeed"}} & set(sys.modules)))
    sys.exit()
selection.select_accelerator = select
app(["chat", {str(tmp_path)!r}])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.stdout == "[]\n", done.stderr


def test_ema_is_the_average_of_a_finished_ppo_stage(finished_run: RunDirectory) -> None:
    for named in (finished_run.path, finished_run.stage("ppo").path, finished_run.stage("ppo").model):
        with pytest.raises(RunError, match=r"has no moving average of a finished ppo stage; train with ppo\.ema, or"):
            model_folder(named, ema=True)
    finished_run.stage("ppo").average.mkdir()
    for named in (finished_run.path, finished_run.stage("ppo").path):
        assert (
            model_folder(named, ema=True) == model_folder(named, "ppo", ema=True) == finished_run.path / "ppo/model-ema"
        )
    with pytest.raises(RunError, match="only PPO's policy has a moving average; remove --stage"):
        model_folder(finished_run.path, "sft", ema=True)
    (finished_run.stage("ppo").path / "stage.json").unlink()
    with pytest.raises(RunError, match="has no moving average of a finished ppo stage"):
        model_folder(finished_run.path, ema=True)


def test_model_that_does_not_exist_is_named(tiny_model: Path, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    with run.open_for(Config()):
        run.stage("sft").metrics.parent.mkdir()
        run.stage("sft").metrics.write_text('{"step": 1}\n')
    with pytest.raises(RunError, match="no finished distill, ppo, dpo or sft stage"):
        model_folder(run.path)
    with pytest.raises(ModelError, match="absent: no such folder"):
        model_folder(tmp_path / "absent")
    with pytest.raises(ModelError, match=r"config.json: is a file; name the folder"):
        model_folder(tiny_model / "config.json")
    with pytest.raises(RunError, match="--stage"):
        model_folder(tiny_model, "sft")


def test_reply_arrives_in_pieces_and_drops_old_turns(model: ChatModel) -> None:
    pieces: list[str] = []
    assert model.reply([("user", "hello")], pieces.append) == "".join(pieces)
    turns = [("user", "hello"), ("assistant", "moo")] * 10 + [("user", "hive")]
    model.reply(turns, pieces.append)
    # 4 of the 16 tokens are kept for the reply; each message takes 3, the last speaker's name 2.
    words = model.writer.tokenizer.decode(model._prompt(turns)).split()
    assert len(words) == 11 and [word for word in words if word != "<unk>"] == ["hello", "moo", "hive"]
    with pytest.raises(ModelError, match=r"too long for this model \(16\)"):
        model.reply([("user", "hello " * 40)], pieces.append)


def test_weights_have_the_precision_but_rotary_frequencies_fp32(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = chat_model(tiny_model, monkeypatch, "bf16").writer.module
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32


TEMPLATE = "{% for m in messages %}hive {{ m.content }}{% endfor %} moo"


@pytest.mark.parametrize(
    ("recorded", "template", "prompt", "converses"),
    [
        ("template", TEMPLATE, "hive hello moo", True),
        ("transcript", None, "Human : hello Assistant :", True),
        ("plain", TEMPLATE, "hello", False),
        ("Human : {prompt} :", None, "Human : hello :", False),
        ("plain", None, "hello", False),
        (None, TEMPLATE, "hive hello moo", True),
        (None, None, "hello", False),
    ],
    ids=[
        "template",
        "transcripts",
        "template switched off",
        "a source's template",
        "lone prompts",
        "a template's folder",
        "a plain folder",
    ],
)
def test_prompt_is_written_as_in_training(
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    recorded: str | None,
    template: str | None,
    prompt: str,
    converses: bool,
) -> None:
    from transformers import AutoTokenizer

    run = RunDirectory(tmp_path / "run")
    folder = run.stage("sft").model
    shutil.copytree(tiny_model, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["Human", "Assistant", ":"])
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    run.stage("sft").finish({"stage": "sft"} | ({"prompt_format": recorded} if recorded else {}))
    model = chat_model(folder, monkeypatch)
    assert model.writer.tokenizer.decode(model._prompt([("user", "hello")])) == prompt
    assert model.writer.converses == converses


def test_reply_ends_at_every_end_token(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for parameter in model.model.layers.parameters():
            parameter.zero_()  # what follows a token is what is likest to it
        model.lm_head.weight.copy_(model.model.embed_tokens.weight[[0, 1, 2, 5, 3, 4]])  # hello, moo, hive, hello, ...
    model.save_pretrained(folder)
    free = chat_model(folder, monkeypatch).reply([("user", "hello")], lambda text: None)
    assert free.split()[0] == "moo" and len(free.split()) == 4
    model.generation_config.eos_token_id = [2, 4]  # <eos> and moo
    model.save_pretrained(folder)
    assert chat_model(folder, monkeypatch).reply([("user", "hello")], lambda text: None) == free, "moo is a word"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["moo"])
    tokenizer.save_pretrained(folder)
    assert chat_model(folder, monkeypatch).reply([("user", "hello")], lambda text: None) == "moo"


class Parrot:
    """Stands for a model, and remembers the conversations that it gets."""

    def __init__(self) -> None:
        self.conversations: list[list[tuple[str, str]]] = []

    def reply(self, turns: Sequence[tuple[str, str]], show: Show) -> str:
        self.conversations.append(list(turns))
        show("moo")
        return "moo"


def converse(lines: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[str, str]]]:
    """Return the conversations that a model gets if these lines and Ctrl-D are typed."""
    waiting = iter(lines)

    def typed(prompt: str) -> str:
        for line in waiting:
            return line
        raise EOFError

    monkeypatch.setattr("builtins.input", typed)
    parrot = Parrot()
    _converse(parrot, True, "runs/[/x] on cpu")  # type: ignore[arg-type]
    return parrot.conversations


def test_help_shows_the_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert not converse(["/help"], monkeypatch)
    shown = capsys.readouterr().out
    assert all(f"\n{command} " in shown for command in ("/help", "/reset", "/exit"))
    assert "runs/[/x] on cpu" in shown, "brackets are not markup"


@pytest.mark.parametrize("line", ["/hepl", "/save now", "/resets"])
def test_unknown_command_is_not_a_message(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not converse([line], monkeypatch)
    assert f"no such command: {line.split()[0]}; /help shows them" in capsys.readouterr().out


@pytest.mark.parametrize("line", ["/etc/hosts is what?", "1 / 2", "/ is a slash", "what does /help do?"])
def test_slash_alone_makes_no_command(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert converse([line], monkeypatch) == [[("user", line)]]


def test_reset_forgets_the_conversation_and_exit_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    first = [("user", "a"), ("assistant", "moo"), ("user", "b")]
    assert converse(["a", "b", "/reset", "c", "/exit", "d"], monkeypatch) == [first[:1], first, [("user", "c")]]


def test_reward_model_is_refused(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If its embeddings are tied, it would load as a language model, and babble."""
    from transformers import AutoModelForSequenceClassification

    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1).save_pretrained(folder)
    with pytest.raises(ModelError, match="is a reward model, which cannot generate text"):
        chat_model(folder, monkeypatch)


def test_pipe_gets_a_reply_for_each_line(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHF_ACCELERATOR", "cpu")
    command = ["chat", str(tiny_model), "--max-tokens", "3", "--precision", "fp32"]
    done = CliRunner().invoke(app, command, input=b"hello \xff\n\nmoo\n")  # a byte that is not text
    assert done.exit_code == 0
    assert done.stdout.count("\n") == 2
