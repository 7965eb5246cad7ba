"""`rlhf chat` finds the model of a run and answers, line by line through a pipe."""

from pathlib import Path

import pytest

from rlhf.cli.chat import ChatModel, model_folder
from rlhf.cli.options import Options
from rlhf.config import Config
from rlhf.errors import ModelError, RunError
from rlhf.run import RunDirectory


@pytest.fixture
def finished_run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "run")
    run.begin(Config())
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


def test_the_folder_of_a_stage_answers(finished_run: RunDirectory) -> None:
    assert model_folder(finished_run.stage("sft").path) == finished_run.stage("sft").model


def test_a_run_without_a_finished_stage_is_named(tmp_path: Path) -> None:
    RunDirectory(tmp_path / "run").begin(Config())
    with pytest.raises(RunError, match="no finished ppo or sft stage"):
        model_folder(tmp_path / "run")


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="absent: no such folder"):
        model_folder(tmp_path / "absent")


def test_a_stage_is_asked_of_runs_only(tiny_model: Path) -> None:
    with pytest.raises(RunError, match="leave it out"):
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


def test_a_pipe_gets_an_answer_for_each_line(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from rlhf.cli.app import app

    monkeypatch.setenv("RLHF_ACCELERATOR", "cpu")
    done = CliRunner().invoke(
        app, ["chat", str(tiny_model), "--max-tokens", "3", "--precision", "fp32"], input="hello\n\nmoo\n"
    )
    assert done.exit_code == 0
    assert done.stdout.count("\n") == 2
