"""The recipes after the Gaudi fork's examples, with toys in the place of models and data.

All graphs are known after the first steps, and no value is read inside a step.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Run

from rlhf.config.schema import load_config

EXAMPLES = Path(__file__).parents[3] / "example_scripts"
SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("bloom", SIZES),
    "other_language": ("bloom", SIZES),
    "llama2-7b": ("llama", SIZES | {"intermediate_size": 96, "max_position_embeddings": 512}),
}
RECIPES = {  # the stages that each has
    "bloom/1b1": ["sft", "reward", "dpo", "ppo"],
    "bloom/1b1-lora": ["sft", "reward", "dpo", "ppo"],
    "other_language/chinese": ["sft"],
    "llama2-7b/full": ["sft", "reward", "dpo", "ppo"],
    "llama2-7b/lora": ["sft", "reward", "dpo", "ppo"],
    "llama2-7b/quantized": ["sft", "reward", "dpo", "ppo"],
}


def toy(recipe: Path, folder: Path, words: Path) -> list[str]:
    """The options that put a toy of the family, with the tokenizer of `words`, in the place of a recipe's models."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoTokenizer

    architecture, sizes = FAMILIES[recipe.parent.name]
    tokenizer = AutoTokenizer.from_pretrained(words)
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    config = CONFIG_MAPPING[architecture](vocab_size=len(tokenizer), **ids, **sizes)
    MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    keys = ["model.path", *(["reward.model"] if load_config(recipe).reward.model else [])]
    return [part for key in keys for part in ("--set", f"{key}={folder}")]


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_compiles_nothing_late(python: Run, recipe: Path, tmp_path: Path, name: str) -> None:
    ours, stages = EXAMPLES / f"{name}.yaml", RECIPES[name]
    rows = [json.loads(line) for line in (recipe.parent / "train.jsonl").read_text().splitlines()]
    many = tmp_path / "rows.jsonl"  # enough different prompts for every stage
    rows = [row | {"prompt": f"{row['prompt']} w{number}"} for number in range(8) for row in rows]
    many.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = json.dumps([{"path": str(many), "stages": ["sft"] if stages == ["sft"] else ["sft", "reward", "ppo"]}])
    given = [*toy(ours, tmp_path / "toy", recipe.parent / "model"), "--set", f"data.datasets={data}", "--json"]
    wanted = [part for stage in stages for part in ("--stage", stage)]
    command = ["-c", "from gaudi_sim.doctor import main; main()", "shapes", "--config", str(ours)]
    # Lazy mode records every operator; ZeRO 3 is refused there.
    mode = "eager" if load_config(ours).engine.zero_stage == 3 else "lazy"
    done = python(*command, *wanted, *given, "--mode", mode, simulated=False)
    assert done.returncode == 0, done.stdout + done.stderr
    reports = {report["stage"]: report for report in json.loads(done.stdout)}
    assert list(reports) == stages
    for stage, report in reports.items():
        assert report["compilations"][0] > 0 or mode == "eager"  # ZeRO 3 leaves layers uncompiled
        assert (report["late"], report["breaks"], report["unrecorded"]) == ([], [], None), stage
