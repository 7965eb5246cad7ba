"""Measure the peak memory of PPO with a model of Llama-2-7B's shape on one CPU machine, against an allowed peak.

    python ci/bench/seven_billion.py                   the whole shape: 13.5 GB on disk, 19 GiB of memory
    python ci/bench/seven_billion.py --frozen int8     the frozen base in 8 bits: 12 GiB of memory
    python ci/bench/seven_billion.py --layers 2        a trial run with 2 layers
    python ci/bench/seven_billion.py --write           write the results to ci/bench/results

All four roles share one frozen base through LoRA, in bf16. Weights are random and written tensor by tensor. The run
takes two PPO steps, each with a rollout of 2 x (16 + 16) tokens. The exit code is 0 if the peak stays below 19 GiB
(12 GiB for int8 and int4), the policy's log-probabilities equal the reference's before the first update, and peft
loads the adapter that the run saves; otherwise it is 1.
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
ALLOWED_PEAKS = {"auto": 19 * 2**30, "int8": 12 * 2**30, "int4": 12 * 2**30}  # bytes


def recipe(folder: Path, model: Path, reward: Path, frozen: str) -> dict[str, Any]:
    """Return the recipe of two PPO steps with two rows each, of 16 prompt tokens and 16 completion tokens."""
    return {
        "output": str(folder / "run"),
        "precision": "bf16",
        "model": {"path": str(model)},
        "lora": {"rank": RANK, "share_base": True, "save": "adapter"},
        "engine": {"shapes": "static", "frozen": frozen},
        "data": {
            "datasets": [{"path": str(rows(folder / "rows.jsonl"))}],
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


def make_reward_model(folder: Path, model: Path) -> Path:
    """Write a reward model like the output of a reward stage that trained `model` with LoRA, and return its folder.

    It has a head, and an adapter next to the model. The files of its base weights are links to those of `model`,
    because they are not read if the base is shared.
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

    adapter = base_sharing.adapter_folder(str(folder))
    adapter.mkdir(exist_ok=True)
    layers = {"self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"), "mlp": ("gate_proj", "up_proj", "down_proj")}
    shapes = {"gate_proj": (config.hidden_size, config.intermediate_size)}
    shapes |= {"up_proj": shapes["gate_proj"], "down_proj": shapes["gate_proj"][::-1]}
    tensors = {"base_model.model.score.weight": score}
    for number in range(config.num_hidden_layers):
        for part, names in layers.items():
            for name in names:
                inputs, outputs = shapes.get(name, (config.hidden_size, config.hidden_size))
                module = f"base_model.model.model.layers.{number}.{part}.{name}"
                tensors[f"{module}.lora_A.weight"] = torch.empty(RANK, inputs, dtype=torch.bfloat16).normal_(0, 0.02)
                tensors[f"{module}.lora_B.weight"] = torch.empty(outputs, RANK, dtype=torch.bfloat16).normal_(0, 0.02)
    save_file(tensors, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    targets = [name for names in layers.values() for name in names]
    lora_config = LoraConfig(
        r=RANK, lora_alpha=16, target_modules=targets, task_type="SEQ_CLS", modules_to_save=["score"]
    )
    lora_config.base_model_name_or_path = str(model)
    lora_config.save_pretrained(str(adapter))
    base_sharing.record_base(adapter, str(model))
    config.save_pretrained(folder)  # last, because it marks the folder as complete
    return folder


def loads_in_peft(adapter: Path, model: Path) -> bool:
    """Return whether peft loads the adapter with no unexpected keys and no missing LoRA keys."""
    import torch
    from peft import PeftConfig, get_peft_model, load_peft_weights, set_peft_model_state_dict
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        outline = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
        peft_model = get_peft_model(outline, PeftConfig.from_pretrained(str(adapter)))
    keys = set_peft_model_state_dict(peft_model, load_peft_weights(str(adapter), "cpu"), low_cpu_mem_usage=True)
    return not keys.unexpected_keys and not [key for key in keys.missing_keys if "lora_" in key]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--frozen",
        choices=tuple(ALLOWED_PEAKS),
        default="auto",
        help="number format of the frozen base (default: auto)",
    )
    parser.add_argument("--layers", type=int, help="number of layers (default: 32)")
    parser.add_argument("--folder", type=Path, help="folder of the models (default: temporary)")
    parser.add_argument("--write", action="store_true", help="write the results to ci/bench/results")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        name = f"{SHAPE}-{arguments.layers or 'all'}"
        model = make(folder / name, SHAPE, layers=arguments.layers)
        reward = make_reward_model(folder / f"{name}-reward" / "model", model)
        recipe_file = folder / "recipe.json"
        values = recipe(folder, model, reward, arguments.frozen)
        recipe_file.write_text(json.dumps(values))
        start = time.perf_counter()
        command = [
            sys.executable,
            "-m",
            "rlhf",
            "ppo",
            "--config",
            str(recipe_file),
            "--accelerator",
            "cpu",
            "--overwrite",
        ]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        subprocess.run(command, check=True, env=environment)
        stage = json.loads((folder / "run" / "ppo" / "stage.json").read_text())
        result = {
            "shape": SHAPE,
            "layers": arguments.layers,
            "frozen": arguments.frozen,
            "peak": stage["peak_memory"],
            "planned": stage.get("planned_memory"),
            "allowed": ALLOWED_PEAKS[arguments.frozen],
            "kl before the first update": stage["before"]["kl"],
            "peft loads the adapter": loads_in_peft(folder / "run" / "ppo" / "adapter", model),
            "seconds": round(time.perf_counter() - start),
        }
    print(json.dumps(result, indent=1))
    passed = result["peak"] < result["allowed"] and stage["before"]["kl"] == 0 and result["peft loads the adapter"]
    if arguments.write:
        file = results_file(Path(__file__).parent, f"seven_billion-{arguments.frozen}")
        file.write_text(json.dumps({"machine": machine(), **result}, indent=1) + "\n")
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
