"""Llama-2-7B's shape on one machine: PPO with all four roles by LoRA on one frozen base, two whole steps in bf16.

    python ci/bench/seven_billion.py                   the whole shape: 13.5 GB on disk, 19 GiB of memory
    python ci/bench/seven_billion.py --frozen int8     the base in 8 bits: 12 GiB
    python ci/bench/seven_billion.py --layers 2        a trial

Weights are random and written tensor by tensor. Two rollouts of 2 x (16 + 16) tokens are made and learned from. Checked
are the peak, that the policy's log-probabilities equal the reference's before the first update, and that peft loads the
adapter that is left.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from machine import machine, results_file  # noqa: E402
from random_models import make, rows  # noqa: E402

SHAPE, RANK = "llama-2-7b", 8
MOST = {"auto": 19 * 2**30, "int8": 12 * 2**30, "int4": 12 * 2**30}  # bytes


def recipe(place: Path, model: Path, reward: Path, frozen: str) -> dict[str, Any]:
    """Two rows a step, two steps, 16 tokens of prompt and 16 of answer."""
    return {
        "output": str(place / "run"),
        "precision": "bf16",
        "model": {"path": str(model)},
        "lora": {"rank": RANK, "share_base": True, "save": "adapter"},
        "engine": {"shapes": "static", "frozen": frozen},
        "data": {
            "datasets": [{"path": str(rows(place / "rows.jsonl"))}],
            "max_prompt_length": 16,
            "max_completion_length": 16,
            "too_long": "truncate",
            "chat_template": False,
        },
        "ppo": {
            "actor": str(model),
            "reward_model": str(reward),
            "steps": 2,
            "batch_size": 2,
            "micro_batch_size": 2,
            "eval_rows": 2,
            "checkpoint_every": 0,
        },
    }


def adapted(folder: Path, model: Path) -> Path:
    """A reward model as the reward stage leaves one that LoRA trained on `model`: an adapter and a head next to it.

    Its own weights, which are not read where the base is shared, are links to those of `model`.
    """
    import torch
    from peft import LoraConfig
    from safetensors.torch import save_file
    from transformers import AutoConfig

    from rlhf.roles import base_sharing

    if (folder / "config.json").is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    config = AutoConfig.from_pretrained(model, num_labels=1, architectures=["LlamaForSequenceClassification"])
    score = torch.empty(1, config.hidden_size, dtype=torch.bfloat16).normal_(0, 0.02)
    index = json.loads((model / "model.safetensors.index.json").read_text())
    index["weight_map"].pop("lm_head.weight")
    for file in set(index["weight_map"].values()):
        (folder / file).symlink_to((model / file).resolve())
    save_file({"score.weight": score}, folder / "head.safetensors", metadata={"format": "pt"})
    index["weight_map"]["score.weight"] = "head.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for file in model.glob("*token*"):
        (folder / file.name).write_bytes(file.read_bytes())

    own = base_sharing.adapter_folder(str(folder))
    own.mkdir(exist_ok=True)
    layers = {"self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"), "mlp": ("gate_proj", "up_proj", "down_proj")}
    shapes = {"gate_proj": (config.hidden_size, config.intermediate_size)}
    shapes |= {"up_proj": shapes["gate_proj"], "down_proj": shapes["gate_proj"][::-1]}
    tensors = {"base_model.model.score.weight": score}
    for number in range(config.num_hidden_layers):
        for part, names in layers.items():
            for name in names:
                inputs, outputs = shapes.get(name, (config.hidden_size, config.hidden_size))
                before = f"base_model.model.model.layers.{number}.{part}.{name}"
                tensors[f"{before}.lora_A.weight"] = torch.empty(RANK, inputs, dtype=torch.bfloat16).normal_(0, 0.02)
                tensors[f"{before}.lora_B.weight"] = torch.empty(outputs, RANK, dtype=torch.bfloat16).normal_(0, 0.02)
    save_file(tensors, own / "adapter_model.safetensors", metadata={"format": "pt"})
    targets = [name for names in layers.values() for name in names]
    made = LoraConfig(r=RANK, lora_alpha=16, target_modules=targets, task_type="SEQ_CLS", modules_to_save=["score"])
    made.base_model_name_or_path = str(model)
    made.save_pretrained(str(own))
    base_sharing.record_base(own, str(model))
    config.save_pretrained(folder)  # last: it marks the folder as complete
    return folder


def loads_in_peft(adapter: Path, model: Path) -> bool:
    """Whether peft takes all of the adapter, and nothing of it is missing."""
    import torch
    from peft import PeftConfig, get_peft_model, load_peft_weights, set_peft_model_state_dict
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        outline = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
        adapted = get_peft_model(outline, PeftConfig.from_pretrained(str(adapter)))
    found = set_peft_model_state_dict(adapted, load_peft_weights(str(adapter), "cpu"), low_cpu_mem_usage=True)
    return not found.unexpected_keys and not [key for key in found.missing_keys if "lora_" in key]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frozen", choices=tuple(MOST), default="auto", help="numbers of the frozen base")
    parser.add_argument("--layers", type=int, help="in place of 32")
    parser.add_argument("--folder", type=Path, help="where models are kept; default: a temporary folder")
    parser.add_argument("--write", action="store_true", help="write the results to ci/bench/results")
    wanted = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        place = wanted.folder or Path(temporary)
        place.mkdir(parents=True, exist_ok=True)
        name = f"{SHAPE}-{wanted.layers or 'all'}"
        model = make(place / name, SHAPE, layers=wanted.layers)
        reward = adapted(place / f"{name}-reward" / "model", model)
        file = place / "recipe.json"
        values = recipe(place, model, reward, wanted.frozen)
        file.write_text(json.dumps(values))
        began = time.perf_counter()
        command = [sys.executable, "-m", "rlhf", "ppo", "--config", str(file), "--accelerator", "cpu", "--overwrite"]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        subprocess.run(command, check=True, env=environment)
        stage = json.loads((place / "run" / "ppo" / "stage.json").read_text())
        found = {
            "shape": SHAPE,
            "layers": wanted.layers,
            "frozen": wanted.frozen,
            "peak": stage["peak_memory"],
            "planned": stage.get("planned_memory"),
            "allowed": MOST[wanted.frozen],
            "kl before the first update": stage["before"]["kl"],
            "peft loads the adapter": loads_in_peft(place / "run" / "ppo" / "adapter", model),
            "seconds": round(time.perf_counter() - began),
        }
    print(json.dumps(found, indent=1))
    passed = found["peak"] < found["allowed"] and stage["before"]["kl"] == 0 and found["peft loads the adapter"]
    if wanted.write:
        file = results_file(Path(__file__).parent, f"seven_billion-{wanted.frozen}")
        file.write_text(json.dumps({"machine": machine(), **found}, indent=1) + "\n")
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
