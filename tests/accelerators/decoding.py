"""Small models, and their logits as a rollout computes them: prompts first, then a token at a time."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from accelerators.backends.cpu import attention as cpu_attention
from accelerators.backends.cpu.kernels import decode
from rlhf.generation.kv_cache import WindowedStaticCache
from rlhf.models.transformers_patches import cache_argument

WHOLE = {"num_attention_heads": 3, "num_key_value_heads": 3}
"""Of families whose heads fill the hidden size and share no keys."""
MIXED = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},  # of the output's projection too
    "mistral": {"tie_word_embeddings": True, "sliding_window": 6},
    "qwen2": {},  # biases of q, k and v
    "qwen3": {"attention_bias": True},  # norms of q and k
    "mixtral": {"num_local_experts": 5},
    "qwen3_moe": {"num_experts": 9, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "mlp_only_layers": [1]},
    "smollm3": {"no_rope_layers": [1, 0]},  # the second layer has no positions
    "phi3": {},  # q, k and v in one product, gate and up in another
    "gemma": {"hidden_activation": "gelu_pytorch_tanh"},
    "gemma2": MIXED | {"query_pre_attn_scalar": 20, "attn_logit_softcapping": 2.0},
    "gemma3_text": MIXED | {"query_pre_attn_scalar": 20},  # each kind of layer has its own rotary positions
    "stablelm": WHOLE | {"use_parallel_residual": True, "use_qkv_bias": True},  # a quarter of each head is rotated
    "starcoder2": WHOLE,
    "phi": WHOLE,  # attention and MLP read the same norm
    "gpt2": {"num_attention_heads": 3, "n_inner": 288},
    "opt": WHOLE | {"ffn_dim": 288, "word_embed_proj_dim": 96},
    "gpt_neox": {"num_attention_heads": 3},
    "bloom": {"num_attention_heads": 3},
}
SIZES = {
    "hidden_size": 96,
    "intermediate_size": 288,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 0.01,  # as large as the squares
    "vocab_size": 304,  # 19 panels: the last block has one
}
PROMPT, STEPS = 12, 5
"""Columns of the prompts, and tokens that are decoded one at a time: 17, 18, ... columns in caches that grow."""


def model_of(family: str = "llama", dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Any:
    """With weights so large that attention looks at few tokens, and no bias or norm of zeros or ones."""
    cpu_attention.composed(None)
    config = CONFIG_MAPPING[family](**{**SIZES, **FAMILIES[family], "pad_token_id": 0, **changes})
    attention = "eager" if family in ("bloom", "gemma2") else cpu_attention.ATTENTION
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).to(dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.5)
            elif parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.mul_(4)
    return model


def truth(model: Any) -> Any:
    """The same weights in float32, with transformers' own attention."""
    exact = copy.deepcopy(model).float()
    exact.set_attn_implementation("eager")
    return exact


def prompts(rows: int, columns: int = PROMPT) -> tuple[Tensor, Tensor]:
    """Tokens [rows, columns + STEPS] and the mask of the prompts; every other row is padded left."""
    ids, mask = torch.randint(3, 304, (rows, columns + STEPS)), torch.ones(rows, columns, dtype=torch.long)
    mask[::2, : columns // 2] = 0
    return ids, mask


class Viewed:
    """Rlhf's: parts of longer buffers, of which the last row leaves on the way; or buffers that grow by fours."""

    def __init__(self, config: Any, length: int, grows: bool) -> None:
        self.cache, self.grows = WindowedStaticCache(config, 0, 3 * length, grows=grows), grows

    def show(self, rows: int, first: int, tokens: int) -> int:
        """Return the visible columns: the last ones are empty."""
        self.cache.window.all_rows = self.cache.window.all_rows or rows
        columns = -(-(first + tokens) // 4) * 4
        self.cache.show(rows, columns, torch.arange(first, first + tokens), first)
        return columns


@torch.no_grad()
def logits_of(model: Any, given: tuple[Tensor, Tensor], kind: str = "viewed", leaves: bool = False) -> Tensor:
    """[STEPS + 1, rows, vocabulary] in float64: of the prompts, then of a token at a time.

    `leaves`: the last row is there for the prompts and the first token alone.
    """
    ids, mask = given
    columns, rows = mask.shape[1], len(ids)
    view = Viewed(model.config, columns + STEPS + 3, kind == "grown")
    positions, outputs = (mask.cumsum(1) - 1).clamp(min=0), []
    for first, last in [(0, columns), *((column, column + 1) for column in range(columns, columns + STEPS))]:
        if leaves and first > columns:
            rows = len(ids) - 1
        if first:
            mask = torch.cat([mask, mask.any(1, keepdim=True).long()], 1)
            positions = positions[:, -1:] + 1
        visible = view.show(rows, first, last - first)
        logits = model(
            input_ids=ids[:rows, first:last],
            attention_mask=nn.functional.pad(mask[:rows], (0, visible - mask.shape[1])),
            position_ids=positions[:rows],
            use_cache=True,
            **{cache_argument(model): view.cache},
        ).logits[:, -1]
        outputs.append(torch.cat([logits, logits.new_zeros(len(ids) - rows, logits.shape[1])]))
    return torch.stack(outputs).double()


def off(actual: Tensor, exact: Tensor) -> float:
    return ((actual - exact).pow(2).mean() / exact.pow(2).mean()).sqrt().item()


def check(model: Any, given: tuple[Tensor, Tensor], kind: str = "viewed") -> None:
    """Logits of the prepared model are as near to float32 as those of the model are; in bf16 they were a bit nearer."""
    exact, plain = logits_of(truth(model), given), logits_of(model, given)
    restore = decode.prepare(model, True)
    logits = logits_of(model, given, kind)
    restore()
    error, usual = off(logits, exact), off(plain, exact)
    if model.dtype == torch.float32:
        assert error < 3e-6
        return
    if hasattr(model.config, "num_experts_per_tok"):  # rounding may send a row to another expert, here and there
        assert error < 0.15
        return
    assert 1e-4 < usual < 0.05
    assert error <= 1.1 * usual, f"{error:.4f} of the logits, plain bf16 {usual:.4f}"
