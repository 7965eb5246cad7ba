"""`rlhf chat` finds the model of a run and answers, line by line through a pipe."""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from rlhf.cli.chat import ChatModel, Show, _converse
from rlhf.cli.options import Options
from rlhf.config.schema import Config
from rlhf.errors import ModelError, RunError
from rlhf.evaluation.models import model_folder
from rlhf.runs.directory import RunDirectory
from rlhf.utils.file_lock import lock_folder


@pytest.fixture
def finished_run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "run")
    with run.open_for(Config()):
        for name in ("sft", "reward", "ppo"):
            run.stage(name).model.mkdir(parents=True)
            run.stage(name).finish({})
    return run


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with random weights and a tokenizer of a few words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = ["<unk>", "<pad>", "<eos>", "hello", "moo", "hive"]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>"
    )
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
        eos_token_id=2,
        pad_token_id=1,
    )
    folder = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def model(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> ChatModel:
    monkeypatch.setenv("RLHF_ACCELERATOR", "cpu")  # also restores what the model exports
    return ChatModel(tiny_model, Options(precision="fp32"), temperature=0, max_tokens=4)


def test_the_last_finished_stage_of_a_run_answers(finished_run: RunDirectory) -> None:
    assert model_folder(finished_run.path) == finished_run.stage("ppo").model
    assert model_folder(finished_run.path, "sft") == finished_run.stage("sft").model


@pytest.mark.parametrize("named", [".", "ppo", "ppo/model"])
def test_what_a_killed_run_was_to_replace_answers(finished_run: RunDirectory, named: str) -> None:
    finished_run.create_backup(["sft", "reward", "ppo"])  # and then the process died
    assert model_folder(finished_run.path / named) == finished_run.stage("ppo").model
    assert finished_run.stage("ppo").model.is_dir()


def test_a_complete_stage_answers_while_the_run_goes_on(finished_run: RunDirectory) -> None:
    with lock_folder(finished_run.path):
        assert model_folder(finished_run.path, "sft") == finished_run.stage("sft").model


def test_the_backend_is_chosen_before_torch_is_imported(tmp_path: Path) -> None:
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


def test_the_folder_of_a_stage_answers(finished_run: RunDirectory) -> None:
    assert model_folder(finished_run.stage("sft").path) == finished_run.stage("sft").model


def test_a_run_answers_with_its_average_where_it_has_one(finished_run: RunDirectory) -> None:
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


def test_a_run_without_a_finished_stage_is_named(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    with run.open_for(Config()):
        run.stage("sft").metrics.parent.mkdir()
        run.stage("sft").metrics.write_text('{"step": 1}\n')
    with pytest.raises(RunError, match="no finished ppo, dpo or sft stage"):
        model_folder(tmp_path / "run")


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="absent: no such folder"):
        model_folder(tmp_path / "absent")


def test_a_file_is_named(tiny_model: Path) -> None:
    with pytest.raises(ModelError, match=r"config.json: is a file; name the folder"):
        model_folder(tiny_model / "config.json")


def test_a_stage_is_asked_of_runs_only(tiny_model: Path) -> None:
    with pytest.raises(RunError, match="--stage"):
        model_folder(tiny_model, "sft")


def test_an_answer_arrives_piece_by_piece(model: ChatModel) -> None:
    pieces: list[str] = []
    answer = model.reply([("user", "hello")], pieces.append)
    assert "".join(pieces) == answer


def test_old_turns_are_left_out_when_the_model_is_full(model: ChatModel) -> None:
    turns = [("user", "hello"), ("assistant", "moo")] * 10 + [("user", "hive")]
    model.reply(turns, lambda text: None)


def test_a_message_that_fits_no_model_is_an_error(model: ChatModel) -> None:
    with pytest.raises(ModelError, match=r"too long for this model \(16\)"):
        model.reply([("user", "hello " * 40)], lambda text: None)


def chat_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch, precision: str = "fp32", max_tokens: int = 4
) -> ChatModel:
    monkeypatch.setenv("RLHF_ACCELERATOR", "cpu")
    return ChatModel(folder, Options(precision=precision), temperature=0, max_tokens=max_tokens)


def test_weights_take_the_compute_precision_and_rotary_frequencies_keep_theirs(
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
        ("plain", None, "hello", False),
        (None, TEMPLATE, "hive hello moo", True),
        (None, None, "hello", False),
    ],
    ids=["template", "transcripts", "template switched off", "lone prompts", "a template's folder", "a plain folder"],
)
def test_the_prompt_is_written_as_in_training(
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
    run.stage("sft").finish({"prompt_format": recorded} if recorded else {})
    model = chat_model(folder, monkeypatch)
    assert model.writer.tokenizer.decode(model._prompt([("user", "hello")])) == prompt
    assert model.converses == converses


def test_an_answer_ends_at_every_token_that_ends_generation(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_folders_may_have_any_name(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """[/x] would be markup."""

    def leave(prompt: str) -> str:
        raise EOFError

    monkeypatch.setattr("builtins.input", leave)
    _converse(None, False, "runs/[/x] on cpu")  # type: ignore[arg-type]
    assert "runs/[/x] on cpu" in capsys.readouterr().out


class Parrot:
    """In the place of a model: remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[list[tuple[str, str]]] = []

    def reply(self, turns: Sequence[tuple[str, str]], show: Show) -> str:
        self.told.append(list(turns))
        show("moo")
        return "moo"


def conversation(lines: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> Parrot:
    """What a model is told when these lines are typed; what is left of them is Ctrl-D."""
    waiting = iter(lines)

    def typed(prompt: str) -> str:
        for line in waiting:
            return line
        raise EOFError

    monkeypatch.setattr("builtins.input", typed)
    parrot = Parrot()
    _converse(parrot, True, "a model")  # type: ignore[arg-type]
    return parrot


def test_help_shows_the_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    parrot = conversation(["/help"], monkeypatch)
    shown = capsys.readouterr().out
    assert all(f"\n{command} " in shown for command in ("/help", "/reset", "/exit"))
    assert not parrot.told


@pytest.mark.parametrize("line", ["/hepl", "/save now", "/resets"])
def test_an_unknown_command_is_not_a_message(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parrot = conversation([line], monkeypatch)
    assert f"no such command: {line.split()[0]}; /help shows them" in capsys.readouterr().out
    assert not parrot.told


@pytest.mark.parametrize("line", ["/etc/hosts is what?", "1 / 2", "/ is a slash", "what does /help do?"])
def test_a_slash_alone_makes_no_command(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert conversation([line], monkeypatch).told == [[("user", line)]]


def test_reset_forgets_and_exit_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    parrot = conversation(["a", "b", "/reset", "c", "/exit", "d"], monkeypatch)
    first = [("user", "a"), ("assistant", "moo"), ("user", "b")]
    assert parrot.told == [first[:1], first, [("user", "c")]]


def test_a_reward_model_is_nobody_to_talk_to(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its embeddings are tied, it would load as a language model, and babble."""
    from transformers import AutoModelForSequenceClassification

    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1).save_pretrained(folder)
    with pytest.raises(ModelError, match="is a reward model, which cannot generate text"):
        chat_model(folder, monkeypatch)


def test_a_pipe_gets_an_answer_for_each_line(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from rlhf.cli.app import app

    monkeypatch.setenv("RLHF_ACCELERATOR", "cpu")
    done = CliRunner().invoke(
        app, ["chat", str(tiny_model), "--max-tokens", "3", "--precision", "fp32"], input="hello\n\nmoo\n"
    )
    assert done.exit_code == 0
    assert done.stdout.count("\n") == 2


def test_bytes_that_are_no_text_are_answered(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from rlhf.cli.app import app

    monkeypatch.setenv("RLHF_ACCELERATOR", "cpu")
    command = ["chat", str(tiny_model), "--max-tokens", "3", "--precision", "fp32"]
    done = CliRunner().invoke(app, command, input=b"hello \xff\nmoo\n")
    assert done.exit_code == 0
    assert done.stdout.count("\n") == 2
