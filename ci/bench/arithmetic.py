"""What the work costs in bytes and floating-point operations, and the seconds that a machine needs for it at least.

Counted is what no implementation can leave out: the weights, in 16 bits, read once a step; the keys and values of the
tokens so far; two operations for each weight and token, four for each head's number, query and key. Nothing is counted
of norms, sampling, gradients' traffic or the optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

BYTES = 2  # of a number in bf16


@dataclass(frozen=True)
class Shape:
    """Of a language model: numbers in the matrices of its layers, and in the one to the vocabulary; its attention."""

    body: int
    vocabulary: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, folder: Path) -> Shape:
        """Of the model in `folder`, whatever its family: its matrices are counted."""
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.pytorch_utils import Conv1D

        config = AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        head = model.get_output_embeddings().weight
        products = (module for module in model.modules() if isinstance(module, torch.nn.Linear | Conv1D))
        numbers = sum(module.weight.numel() for module in products)
        heads = config.num_attention_heads
        return cls(
            body=numbers - head.numel(),
            vocabulary=head.numel(),
            layers=config.num_hidden_layers,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        )


@dataclass(frozen=True)
class Work:
    """Rows, and the tokens of their prompts and completions."""

    rows: int
    prompt: int
    completion: int


def attention_flops(shape: Shape, queries: int, keys: int) -> int:
    """Of `queries` tokens that each see `keys` tokens, in all layers."""
    return 4 * shape.layers * shape.heads * shape.head_dim * queries * keys


def forward_flops(shape: Shape, rows: int, length: int, predicted: int) -> int:
    """Of one pass over rows of `length` tokens, causal, of which `predicted` each are given a distribution."""
    tokens = rows * length
    products = 2 * (shape.body * tokens + shape.vocabulary * rows * predicted)
    return products + attention_flops(shape, tokens, length + 1) // 2


def ppo_flops(shape: Shape, work: Work) -> dict[str, int]:
    """Of one PPO step with one update a rollout, by phase: policy and critic are not scored, which one update spares.

    Training is three forward passes' worth: forward, and backward to inputs and to weights.
    """
    length = work.prompt + work.completion
    language = forward_flops(shape, work.rows, length, work.completion)
    scalar = forward_flops(shape, work.rows, length, 0)
    steps = range(work.prompt + 1, length)
    decoding = sum(decode_flops(shape, work.rows, seen) for seen in steps)
    return {
        "generation": forward_flops(shape, work.rows, work.prompt, 1) + decoding,
        "scoring": language + scalar,
        "training": 3 * (language + scalar),
    }


def decode_flops(shape: Shape, rows: int, seen: int) -> int:
    """Of one token for each row, which then sees `seen` tokens, itself included."""
    return 2 * (shape.body + shape.vocabulary) * rows + attention_flops(shape, rows, seen)


def decode_bytes(shape: Shape, rows: int, seen: int) -> int:
    """Read in such a step: all matrices, and the keys and values of `seen` tokens of each row."""
    cache = 2 * shape.layers * shape.kv_heads * shape.head_dim * rows * seen
    return BYTES * (shape.body + shape.vocabulary + cache)


def rollout_limit(shape: Shape, work: Work, *, bytes_per_second: float, flops_per_second: float) -> dict[str, Any]:
    """The least seconds of a rollout: a prefill, and `completion - 1` steps, each bound by bytes or by operations."""

    def least(read: int, flops: int) -> float:
        return max(read / bytes_per_second, flops / flops_per_second)

    first_bytes = BYTES * (shape.body + shape.vocabulary)
    first_flops = forward_flops(shape, work.rows, work.prompt, 1)
    prefill = least(first_bytes, first_flops)
    steps = [
        (decode_bytes(shape, work.rows, seen), decode_flops(shape, work.rows, seen))
        for seen in range(work.prompt + 1, work.prompt + work.completion)
    ]
    decoding = sum(least(*step) for step in steps)
    middle = steps[len(steps) // 2] if steps else (0, 0)
    return {
        "shape": asdict(shape),
        "prefill": {"bytes": first_bytes, "flops": first_flops, "seconds": round(prefill, 4)},
        "decode_step": {
            "which": f"the {len(steps) // 2 + 1}th of {len(steps)}",
            "bytes": middle[0],
            "flops": middle[1],
            "seconds_for_bytes": round(middle[0] / bytes_per_second, 5),
            "seconds_for_flops": round(middle[1] / flops_per_second, 5),
        },
        "decode_steps": {"count": len(steps), "seconds": round(decoding, 4)},
        "seconds": round(prefill + decoding, 4),
    }


def speeds(limits: Mapping[str, Any]) -> dict[str, float]:
    """Of what `machine.py` measured: what the arithmetic divides by."""
    return {
        "bytes_per_second": max(limits["read_bytes_per_second"].values()),
        "flops_per_second": max(value for name, value in limits["flops_per_second"].items() if name.startswith("bf16")),
    }
