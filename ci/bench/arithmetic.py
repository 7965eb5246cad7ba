"""Count the bytes and floating-point operations of the benchmarks' work, and the least time a machine needs for it.

The counts are those of plain passes over whole rows: reading the weights once per step; reading the keys and values of
the tokens so far; two operations per weight and token; and, in attention, four operations per query, key, head and
dimension of a head. A pass could do slightly less: no token follows the last one of a row, so its results matter only
to a reward model. Norms, sampling and the memory traffic of gradients are not counted; that of the optimizer
is counted only in `update_bytes`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

BYTES = {"bf16": 2, "fp32": 4}  # per number


@dataclass(frozen=True)
class Shape:
    """The sizes of a language model that determine its work.

    Attributes:
        body: weights in the matrices of all layers.
        vocabulary: weights in the output matrix, which maps hidden states to the vocabulary.
        layers: layers.
        heads: query heads per layer.
        kv_heads: key and value heads per layer.
        head_dim: dimension of a head.
    """

    body: int
    vocabulary: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, folder: Path) -> Shape:
        """Return the shape of the model in `folder`, of any family, by counting the weights of its matrices."""
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.pytorch_utils import Conv1D

        config = AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        output = model.get_output_embeddings().weight
        products = (module for module in model.modules() if isinstance(module, torch.nn.Linear | Conv1D))
        weights = sum(module.weight.numel() for module in products)
        heads = config.num_attention_heads
        return cls(
            body=weights - output.numel(),
            vocabulary=output.numel(),
            layers=config.num_hidden_layers,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        )


@dataclass(frozen=True)
class Work:
    """The rows of a step, and the tokens of each prompt and each completion."""

    rows: int
    prompt: int
    completion: int


def attention_flops(shape: Shape, queries: int, keys: int) -> int:
    """Return the operations of attention, in all layers, if each of `queries` tokens attends to `keys` tokens."""
    return 4 * shape.layers * shape.heads * shape.head_dim * queries * keys


def forward_flops(shape: Shape, rows: int, length: int, predicted: int) -> int:
    """Return the operations of one causal forward pass over `rows` rows of `length` tokens.

    The output matrix is applied to `predicted` tokens of each row.
    """
    tokens = rows * length
    products = 2 * (shape.body * tokens + shape.vocabulary * rows * predicted)
    return products + attention_flops(shape, tokens, length + 1) // 2


def ppo_flops(shape: Shape, work: Work) -> dict[str, int]:
    """Return the operations of one PPO step with one update per rollout, by phase.

    Scoring runs the reference and the reward model; with one update per rollout, the policy and the critic need no
    scoring pass. Training costs three forward passes: the forward pass, and the backward passes to the inputs and to
    the weights.
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
    """Return the operations of a decode step: one token per row, which attends to `seen` tokens including itself."""
    return 2 * (shape.body + shape.vocabulary) * rows + attention_flops(shape, rows, seen)


def decode_bytes(shape: Shape, rows: int, seen: int, precision: str = "bf16") -> int:
    """Return the bytes that a decode step reads: all matrices, and the keys and values of `seen` tokens per row."""
    cache = 2 * shape.layers * shape.kv_heads * shape.head_dim * rows * seen
    return BYTES[precision] * (shape.body + shape.vocabulary + cache)


def update_bytes(weights: int) -> int:
    """Return the bytes that AdamW reads and writes for `weights` trained weights.

    In bf16 it reads the gradient and writes the weight in 16 bits; it reads and writes the master weight and both
    moments in 32. In fp32 the sum is the same: the gradient has 32 bits, and there is no other copy of the weight.
    """
    return weights * (2 * BYTES["bf16"] + 2 * 3 * 4)


def rollout_limit(
    shape: Shape, work: Work, *, bytes_per_second: float, flops_per_second: float, precision: str = "bf16"
) -> dict[str, Any]:
    """Return the least time of a rollout, in seconds, with the counts that it follows from.

    A rollout is a prefill and `completion - 1` decode steps. The limit of each is the slower of reading its bytes and
    computing its operations.
    """

    def least_seconds(read: int, flops: int) -> float:
        return max(read / bytes_per_second, flops / flops_per_second)

    first_bytes = BYTES[precision] * (shape.body + shape.vocabulary)
    first_flops = forward_flops(shape, work.rows, work.prompt, 1)
    prefill = least_seconds(first_bytes, first_flops)
    steps = [
        (decode_bytes(shape, work.rows, seen, precision), decode_flops(shape, work.rows, seen))
        for seen in range(work.prompt + 1, work.prompt + work.completion)
    ]
    decoding = sum(least_seconds(*step) for step in steps)
    middle = steps[len(steps) // 2] if steps else (0, 0)
    return {
        "shape": asdict(shape),
        "prefill": {"bytes": first_bytes, "flops": first_flops, "seconds": round(prefill, 4)},
        "decode_step": {
            "which": f"{len(steps) // 2 + 1} of {len(steps)}",
            "bytes": middle[0],
            "flops": middle[1],
            "seconds_for_bytes": round(middle[0] / bytes_per_second, 5),
            "seconds_for_flops": round(middle[1] / flops_per_second, 5),
        },
        "decode_steps": {"count": len(steps), "seconds": round(decoding, 4)},
        "seconds": round(prefill + decoding, 4),
    }


def speeds(limits: Mapping[str, Any], precision: str = "bf16") -> dict[str, float]:
    """Return the highest bytes/s and FLOP/s that `machine.py` measured: the divisors of the arithmetic."""
    flops = (value for name, value in limits["flops_per_second"].items() if name.startswith(precision))
    return {"bytes_per_second": max(limits["read_bytes_per_second"].values()), "flops_per_second": max(flops)}
