"""Families without fused attention go through the stages on the simulated device, and compile nothing late.

DeepSpeed-Chat's examples are OPT and, on Gaudi, BLOOM; Falcon takes none of the attention that is registered.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import proof
import pytest
from conftest import Run

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
OPT = SIZES | {"ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 64}
FAMILIES: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "BLOOM": ("bloom", SIZES, "eager for tiny (gaudi_fused_sdpa: BloomForCausalLM takes none that is registered"),
    "OPT": ("opt", OPT, None),
    "Falcon": ("falcon", SIZES, "sdpa for tiny (gaudi_fused_sdpa: FalconForCausalLM takes none that is registered"),
}


@pytest.mark.parametrize("name", ["OPT", *(pytest.param(name, marks=pytest.mark.slow) for name in ("BLOOM", "Falcon"))])
def test_family_goes_through_stages_and_compiles_nothing_late(
    python: Run, recipe: Path, tmp_path: Path, name: str
) -> None:
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoTokenizer

    architecture, sizes, attention_line = FAMILIES[name]
    tokenizer = AutoTokenizer.from_pretrained(recipe.parent / "model")
    special = {"eos_token_id": proof.EOS, "pad_token_id": proof.PAD, "bos_token_id": None}
    config = CONFIG_MAPPING[architecture](vocab_size=len(tokenizer), **special, **sizes)
    MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).save_pretrained(tmp_path / "tiny")
    tokenizer.save_pretrained(tmp_path / "tiny")
    values = json.loads(recipe.read_text())
    values["model"]["path"] = str(tmp_path / "tiny")
    own, report = tmp_path / "recipe.yaml", tmp_path / "report.json"
    own.write_text(json.dumps(values))
    how = ["--accelerator", "hpu", "--output", str(tmp_path / "run"), "--set", "engine.shapes=static"]
    done = python("-m", "rlhf", "--config", str(own), *how, loaded=True, env={"RLHF_GAUDI_SIM_REPORT": str(report)})
    assert done.returncode == 0, done.stderr[-2000:]
    # Falcon's code takes its one key head by a list of indices, which is copied to the device: not to be recorded.
    assert ("slower" in done.stderr) == (name == "Falcon"), done.stderr
    lines = [line.removeprefix("attention: ") for line in done.stdout.splitlines() if line.startswith("attention: ")]
    assert lines[0].startswith(attention_line) if attention_line else not lines
    run = proof.Run(tmp_path / "run", json.loads(report.read_text()))
    for stage in proof.STAGES:
        assert len(run.steps(stage)) == proof.STEPS
        # The first rollout includes the refused recording, so the second one, after SFT, has other graphs.
        proof.assert_nothing_compiled_late(run, stage, evaluation=(name, stage) != ("Falcon", "sft"))
        proof.assert_no_reads_inside_a_step(run, stage)
    proof.assert_no_mixed_devices(run)
