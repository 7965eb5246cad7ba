"""DPO as a stage: its reference and when it is computed, resuming, and the stages that use its model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from accelerators import Precision
from rlhf.data.stage_dataset import StageData
from rlhf.evaluation.models import model_folder
from rlhf.reporting.recorder import Recorder
from rlhf.runs.directory import RunDirectory
from rlhf.runs.stage_directory import parse_step
from rlhf.trainers import dpo
from rlhf.trainers.dpo import DPOTrainer
from rlhf.trainers.loop import fit
from tests.helpers import assert_same_weights, kill_at, models_of, sets, weights
from tests.in_process import OPTIMIZER, GivenModels, stage_context
from tests.reference import cases
from tests.reference.dpo import before
from tests.reference.network import Network

ROWS = cases.examples("dpo", 9)
DATA = StageData(ROWS[:6], ROWS[6:], [])
LIMITS = {"max_prompt_length": cases.PROMPT, "max_completion_length": cases.COMPLETION}


def run(
    accelerator: Any, folder: Path, *, kind: str = "llama", values: Any = None, precision: Any = None, **settings: Any
) -> list[Any]:
    """Run the stage in `folder`; the records of its steps."""
    settings = {"batch_size": 2, "max_steps": 2, "eval_rows": 2, "optimizer": OPTIMIZER} | settings
    values = {"data": LIMITS, "dpo": settings} | (values or {})
    place = RunDirectory(folder).stage("dpo")
    with Recorder(place, resume_step=place.latest_checkpoint and parse_step(place.latest_checkpoint)) as recorder:
        context = stage_context(accelerator, folder, "dpo", values, precision=precision, recorder=recorder)
        models = GivenModels(lambda role: cases.language_model(1, kind))
        fit(DPOTrainer(context, models, cases.Tokenizer(), DATA), context)
    lines = [json.loads(line) for line in (folder / "dpo" / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "learning_rate" in line]


def test_reference_is_the_first_policy_without_dropout(accelerator, tmp_path):
    run(accelerator, tmp_path, kind="gpt2", dropout=0.5)
    saved = load_file(tmp_path / "dpo" / "reference.safetensors")["log_probs"]
    tokens = [(pair.prompt_ids, pair.chosen_ids, pair.rejected_ids) for pair in ROWS]
    known = torch.tensor(before(Network(cases.language_model(1, "gpt2")), tokens))
    met = ~saved.isnan().any(-1)
    assert met.tolist()[6:] == [True, True, False] and met[:6].sum() == 4  # two held out; two batches of two
    torch.testing.assert_close(saved[met], known[met].float(), atol=1e-5, rtol=1e-5)


def test_damaged_reference_is_not_read(accelerator, tmp_path):
    run(accelerator, tmp_path, max_steps=1)
    path = tmp_path / "dpo" / "reference.safetensors"
    intact = path.read_bytes()
    assert dpo._load_table(path) is not None
    for position in range(len(intact)):
        path.write_bytes(intact[:position] + bytes([intact[position] ^ 1]) + intact[position + 1 :])
        assert dpo._load_table(path) is None, position


@pytest.mark.parametrize("frozen", ["auto", "int8"])
@pytest.mark.parametrize("also_train", [(), ("norms",)])
def test_live_reference_equals_the_precomputed_one(accelerator, tmp_path, frozen, also_train):
    """With LoRA the policy without its adapters; if more is trained, a separate model."""
    values = {"lora": cases.LORA | {"also_train": also_train}, "engine": {"frozen": frozen}}
    steps = [run(accelerator, tmp_path / way, values=values, reference=way) for way in ("precomputed", "beside")]
    for first, second in zip(*steps, strict=True):
        assert first["loss"] == pytest.approx(second["loss"], abs=1e-6)
        assert first["margin"] == pytest.approx(second["margin"], abs=1e-6)
    assert steps[0][0]["loss"] == pytest.approx(0.6931472, abs=1e-6) and steps[0][1]["margin"] != 0
    assert not (tmp_path / "beside" / "dpo" / "reference.safetensors").exists()


def test_longer_stage_extends_its_reference(accelerator, tmp_path):
    run(accelerator, tmp_path / "longer", max_steps=1)
    again = run(accelerator, tmp_path / "longer", max_steps=3)
    assert [step["step"] for step in again] == [1, 2, 3]
    whole = run(accelerator, tmp_path / "whole", max_steps=3)
    assert_same_weights(tmp_path / "longer" / "dpo" / "model", tmp_path / "whole" / "dpo" / "model")
    assert again[-1]["margin"] == whole[-1]["margin"] != 0


def test_in_bf16_too_the_policy_begins_at_its_reference(accelerator, tmp_path):
    first, second = run(accelerator, tmp_path, precision=Precision(torch.bfloat16, "bf16", "asked for"))
    assert first["loss"] == pytest.approx(0.6931472, abs=1e-5)
    assert second["margin"] != 0


def arguments(finished_run: Path, output: Path) -> list[object]:
    keys = (f"dpo.model={finished_run / 'sft' / 'model'}", "dpo.max_steps=6", "dpo.checkpoint_every=1")
    return ["dpo", "--output", output, *sets(*keys)]


@pytest.mark.slow
def test_killed_stage_resumes_to_the_same_weights(rlhf, finished_run, tmp_path):
    whole = rlhf(*arguments(finished_run, tmp_path / "whole")).stdout
    assert "dpo: reference log-probabilities: " in whole and "DPO" in whole
    checkpoint = tmp_path / "killed" / "dpo" / "checkpoints" / "step-00000002"
    kill_at(checkpoint, rlhf, *arguments(finished_run, tmp_path / "killed"))
    output = rlhf(*arguments(finished_run, tmp_path / "killed"), "--resume").stdout
    assert "dpo: resumed after step" in output and "reference log-probabilities" not in output
    assert_same_weights(tmp_path / "killed" / "dpo" / "model", tmp_path / "whole" / "dpo" / "model")


def test_dpo_follows_sft_and_chat_and_ppo_take_its_model(rlhf, finished_run, finished_dpo, tmp_path):
    assert model_folder(finished_dpo) == finished_dpo / "dpo" / "model"
    before = weights(finished_run / "sft" / "model")
    assert any((tensor != before[name]).any() for name, tensor in weights(finished_dpo / "dpo" / "model").items())
    output = tmp_path / "run"
    rlhf("sft", "--output", output)
    assert model_folder(output) == output / "sft" / "model"
    printed = rlhf("dpo", "--output", output, *sets("dpo.reference=beside")).stdout
    assert "this run's sft model" in printed
    assert model_folder(output) == output / "dpo" / "model" and model_folder(output, "sft") == output / "sft" / "model"
    keys = sets(*models_of(finished_run), f"ppo.actor={output / 'dpo' / 'model'}")
    assert f"{output}/dpo/model" in rlhf("ppo", "--output", tmp_path / "ppo", *keys, "--dry-run").stdout
