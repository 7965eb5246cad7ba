"""The models that names load, and their scores: those of plain transformers, row by row without padding."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerators import Precision, ShapePolicy
from rlhf.config.schema import Config, build_config
from rlhf.data.prompt_encoding import make_conversation_row
from rlhf.data.records import Message
from rlhf.data.stage_dataset import load_stage
from rlhf.errors import ModelError, OutOfMemory, RunError
from rlhf.evaluation.models import (
    EvaluationDevice,
    load_language_model,
    load_reward_model,
    read_summary,
    reward_model_folder,
)
from rlhf.evaluation.models import model_folder as folder_of
from rlhf.runs.directory import RunDirectory, find_run
from tests.evaluation.conftest import by_transformers, reward_model
from tests.helpers import build_tokenizer, llama
from tests.models.test_deepspeed_chat import saved

PAIRS = [("cow", "please moo"), ("dog or owl", "go"), ("owl", "hoot hoot thanks no go away red blue"), ("", "no")]
ROWS = [make_conversation_row([Message("user", prompt)], "template") for prompt, _ in PAIRS]
REPLIES = [reply for _, reply in PAIRS]


@pytest.mark.parametrize("shapes", ["static", "bucketed", "dynamic"])
@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_scores_are_those_of_transformers_in_order_of_the_rows(
    device: EvaluationDevice, judge_folder: tuple[Path, Any], tokenizer: Any, shapes: Any, batch_size: int
) -> None:
    folder, model = judge_folder
    judge = load_reward_model(folder, Config(), replace(device, shapes=ShapePolicy(shapes, first=4)))
    scores = judge.scores([ids or [] for ids in judge.encode(ROWS, REPLIES)], batch_size=batch_size)
    expected = [by_transformers(model, tokenizer, *pair) for pair in PAIRS]
    assert scores == pytest.approx(expected, abs=1e-4) and len({round(score, 2) for score in expected}) == len(PAIRS)
    assert judge.max_length == 128 and not judge.module.training


@pytest.mark.parametrize("family", ["opt", "bloom", "gpt2", "gpt_neox"])
def test_any_classifier_of_one_label_scores_without_a_template(
    device: EvaluationDevice, tokenizer: Any, tmp_path: Path, family: str
) -> None:
    plain = type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer, pad_token="<pad>", eos_token="<eos>")
    model = reward_model(tmp_path / "judge", plain, family)
    judge = load_reward_model(tmp_path / "judge", Config(), device)
    assert judge.prompt_format == "plain" and judge.name == str(tmp_path / "judge")
    rows = [make_conversation_row([Message("user", prompt or "go")], "plain") for prompt, _ in PAIRS]
    scores = judge.scores([ids or [] for ids in judge.encode(rows, REPLIES)], batch_size=3)
    for (prompt, reply), score in zip(PAIRS, scores, strict=True):
        ids = torch.tensor([plain(f"{prompt or 'go'} {reply}")["input_ids"] + [plain.eos_token_id]])
        with torch.no_grad():
            assert score == pytest.approx(float(model(ids).logits[0, 0]), abs=1e-4)


def test_deepspeed_chat_model_is_read_at_token_before_the_end(device: EvaluationDevice, tmp_path: Path) -> None:
    theirs = saved(tmp_path / "reward", "opt")
    judge = load_reward_model(tmp_path / "reward", Config(), device)
    (ids,) = judge.encode(ROWS[:1], REPLIES[:1])
    assert ids is not None and ids[-1] == 1
    assert judge.scores([ids]) == pytest.approx([float(theirs.scores(ids[:-1])[-1])], abs=1e-4)


def test_reward_model_of_a_run_is_that_of_its_reward_stage(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    with run.open_for(Config()):
        for name in ("sft", "ppo"):
            run.stage(name).model.mkdir(parents=True)
            run.stage(name).finish({"stage": name})
    with pytest.raises(RunError, match="has no finished reward stage"):
        reward_model_folder(run.path)
    run.stage("reward").model.mkdir(parents=True)
    run.stage("reward").finish({"stage": "reward"})
    expected = run.stage("reward").model
    assert reward_model_folder(run.path) == reward_model_folder(run.path / "reward") == expected
    assert reward_model_folder(expected) == expected
    for inside in (run.path, run.path / "reward", expected):
        directory = find_run(inside)
        assert directory is not None and directory.path.samefile(run.path)
    assert find_run(tmp_path) is None


def test_stage_records_the_ends_of_its_replies(data_file: Path, tokenizer: Any) -> None:
    config = build_config({"data": {"datasets": [{"path": str(data_file)}]}}).data
    for end_ids, recorded in (([1, 7], [1, 7]), (None, [1])):
        assert load_stage(config, "reward", tokenizer, seed=0, end_ids=end_ids).summary["end_ids"] == recorded


def test_prompts_and_ends_are_those_of_the_training(
    device: EvaluationDevice, judge_folder: tuple[Path, Any], tokenizer: Any, tmp_path: Path
) -> None:
    """The reward stage's summary says how it wrote prompts and which tokens ended its replies."""
    folder = Path(shutil.copytree(judge_folder[0], tmp_path / "reward" / "model"))
    (moo,) = tokenizer("moo", add_special_tokens=False)["input_ids"][:1]
    (tmp_path / "reward" / "stage.json").write_text(
        json.dumps({"stage": "reward", "prompt_format": "transcript", "end_ids": [1, moo]})
    )
    judge = load_reward_model(folder, Config(), device)
    row = make_conversation_row([Message("user", "cow")], judge.prompt_format)
    (ids,) = judge.encode([row], ["moo moo"])
    assert ids == [*tokenizer("Human: cow\n\nAssistant:", add_special_tokens=False)["input_ids"], *ids[-2:]]
    assert ids[-1] == moo, "the reply ends at the first of them"


def test_scores_in_16_bits_are_computed_in_float32(device: EvaluationDevice, judge_folder: tuple[Path, Any]) -> None:
    """Rounded themselves, those of good and bad replies would often be equal."""
    coarse = replace(device, precision=Precision(torch.bfloat16, "bf16", "a test's"))
    judge = load_reward_model(judge_folder[0], Config(), coarse)
    sequences = [ids or [] for ids in judge.encode(ROWS, REPLIES)]
    head = judge.module.model
    with torch.no_grad():
        hidden = [head.model(torch.tensor([ids])).last_hidden_state[0, -1].double() for ids in sequences]
    expected = [float(head.score.weight[0].double() @ state) for state in hidden]
    assert judge.scores(sequences, batch_size=1) == pytest.approx(expected, rel=1e-4)
    assert expected != pytest.approx(torch.tensor(expected).bfloat16().tolist(), rel=1e-4)


def test_settings_switch_off_a_template_that_no_stage_recorded(
    device: EvaluationDevice, judge_folder: tuple[Path, Any]
) -> None:
    config = build_config({"data": {"chat_template": False}})
    assert load_reward_model(judge_folder[0], config, device).prompt_format == "plain"
    assert load_reward_model(judge_folder[0], Config(), device).prompt_format == "template"


def test_a_model_of_the_other_kind_is_named(
    device: EvaluationDevice, judge_folder: tuple[Path, Any], model_folder: Path, tokenizer: Any, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match="is a reward model, which cannot generate text"):
        load_language_model(judge_folder[0], Config(), device)
    with pytest.raises(ModelError, match=r"its weights lack score\.weight"):
        load_reward_model(model_folder, Config(), device)
    reward_model(tmp_path / "two", tokenizer, outputs=2)
    with pytest.raises(ModelError, match="its head has 2 outputs, a reward model has one"):
        load_reward_model(tmp_path / "two", Config(), device)


def test_a_score_that_is_no_number_is_an_error(
    device: EvaluationDevice, judge_folder: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = load_reward_model(judge_folder[0], Config(), device)
    judge.module.model.score.weight.fill_(math.nan)
    with pytest.raises(ModelError, match="tiny-judge: a score is nan in fp32"):
        judge.scores([[5, 6, 1]])


def test_the_tokenizer_of_another_model_is_refused(
    device: EvaluationDevice, judge_folder: tuple[Path, Any], tokenizer: Any, tmp_path: Path
) -> None:
    from rlhf.data.toy_world import build_world_tokenizer

    other = build_world_tokenizer()
    other.save_pretrained(tmp_path / "other")
    config = build_config({"model": {"tokenizer": str(tmp_path / "other")}})
    with pytest.raises(ModelError, match=r"this tokenizer has .* tokens, and the model .* knows"):
        load_reward_model(judge_folder[0], config, device)


def test_a_name_that_is_no_path_is_asked_of_the_hub(device: EvaluationDevice) -> None:
    for load in (load_reward_model, load_language_model):
        with pytest.raises(ModelError, match="nobody/nothing: no folder here, and there is no copy of it"):
            load("nobody/nothing", Config(), device)
    with pytest.raises(ModelError, match="absent: no such folder; name a run"):
        load_reward_model("./absent", Config(), device)


@pytest.mark.parametrize("rows", [3, 4])
def test_static_shapes_give_every_batch_one_shape(device: EvaluationDevice, rows: int) -> None:
    """A lazy device compiles a graph for each shape."""
    seen: list[Any] = []

    def compute(input_ids: torch.Tensor, attention_mask: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(input_ids.shape))
        return (input_ids * attention_mask).sum(-1) + more

    lengths = [2, 7, 1, 5, 3, 6, 4]
    static = replace(device, shapes=ShapePolicy("static"))
    widths = static.map_rows(
        [[1] * length for length in lengths], compute, pad=9, batch_size=rows, extras={"more": [10, 20] * 3 + [30]}
    )
    assert widths == [length + more for length, more in zip(lengths, [10, 20] * 3 + [30], strict=True)]
    assert set(seen) == {(rows, 7)}
    assert static.map_rows([], compute, pad=9, batch_size=rows) == []


def test_a_lack_of_memory_is_one_line(device: EvaluationDevice) -> None:
    def compute(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(OutOfMemory, match=r"cpu: too little memory for 2 rows of .* tokens at a time; lower --batch"):
        device.map_rows([[1, 2], [3], [4]], compute, pad=0, batch_size=2)


@pytest.fixture
def adapter(model_folder: Path, tmp_path: Path) -> tuple[Path, Any]:
    """An adapter as peft saves it, and peft's own model with it."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(model_folder)
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    model.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter", model.eval()


def test_lone_adapter_is_merged_as_by_peft(
    device: EvaluationDevice, adapter: tuple[Path, Any], model_folder: Path
) -> None:
    folder, model = adapter
    writer, base = (load_language_model(path, Config(), device) for path in (folder, model_folder))
    ids = torch.arange(2, 40)[None]
    with torch.no_grad():
        expected, actual, without = (network(input_ids=ids).logits for network in (model, writer.module, base.module))
    torch.testing.assert_close(actual, expected)
    assert (actual - without).abs().max() > 0.01 and writer.folder == str(folder)
    assert not any("lora" in name for name, _ in writer.module.named_parameters())


def test_adapter_of_no_model_or_another_one_is_an_error(
    device: EvaluationDevice, adapter: tuple[Path, Any], tmp_path: Path
) -> None:
    folder, _ = adapter
    config = json.loads((folder / "adapter_config.json").read_text())
    llama(300, hidden_size=64).save_pretrained(tmp_path / "wider")
    build_tokenizer().save_pretrained(tmp_path / "wider")
    for base, message in {
        None: "names no base model; set base_model_name_or_path in adapter_config.json",
        str(tmp_path / "gone"): "gone: no such model folder",
        str(folder): "holds a LoRA adapter",
        str(tmp_path / "wider"): r"this adapter cannot be merged into .*wider \(.*for PeftModel\); check its files",
    }.items():
        (folder / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": base}))
        with pytest.raises(ModelError, match=message) as caught:
            load_language_model(folder, Config(), device)
        assert "\n" not in str(caught.value)


def test_folder_of_a_stage_with_only_adapters_is_the_adapters(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    run.description.write_text("{}")
    ppo = run.stage("ppo")
    for name in ("adapter", "adapter-ema"):
        (ppo.path / name).mkdir(parents=True)
    ppo.finish({"stage": "ppo", "prompt_format": "plain"})
    for ema, name in ((False, "adapter"), (True, "adapter-ema")):
        assert folder_of(run.path, ema=ema) == ppo.path / name
    for name in ("adapter", "adapter-ema", "model", "model-ema", "critic"):
        assert read_summary(ppo.path / name)["prompt_format"] == "plain"
    ppo.model.mkdir()
    assert folder_of(run.path) == folder_of(ppo.path) == ppo.model
