"""The families of models that are tested, as data: README's table is made of this (`ci/families.py`).

A row is a name that people know, transformers' name of the architecture, and what makes a tiny one of it, small enough
for a step of a few milliseconds and odd enough to show mistakes: grouped heads, windows shorter than a row.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.helpers import mark_slow

if TYPE_CHECKING:
    from accelerators import KernelImpl

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PAIRS = {"num_key_value_heads": 2}
GROUPED = PAIRS | {"head_dim": 8}
WINDOW = {"sliding_window": 6}
MIXED = WINDOW | {"layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
MAMBA = {"mamba_d_state": 8, "mamba_n_groups": 1, "mamba_n_heads": 8, "mamba_d_head": 8}
LLAMA_3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@dataclass(frozen=True)
class Family:
    """One row.

    `draws`: transformers draws at random in its training mode, in addition to dropout, so that PPO's first ratio
    is not quite 1.
    """

    name: str
    architecture: str
    values: Mapping[str, Any] = field(default_factory=dict)
    notes: str = ""
    draws: bool = False

    def configuration(self, **changes: Any) -> Any:
        """transformers' configuration of a tiny one."""
        from transformers import CONFIG_MAPPING

        return CONFIG_MAPPING[self.architecture](**SIZES | dict(self.values) | changes)

    def attention(self, fused: KernelImpl | None = None) -> str:
        """The attention that it gets: sdpa or eager, or "fused" where a backend's own, of that name, serves it."""
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

        from accelerators.portable import beyond_sdpa
        from rlhf.models.compatibility import explain_missing_attention

        config = self.configuration()
        architecture = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        if fused and not explain_missing_attention(architecture, fused.name) and not fused.refuses(config):
            return "fused"
        return "eager" if explain_missing_attention(architecture, "sdpa") or beyond_sdpa(config) else "sdpa"

    @property
    def decodes_in_c(self) -> bool:
        """Whether the CPU's C code computes its layers, if their sizes suit it."""
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

        from accelerators.backends.cpu.kernels import families

        known, layers = families.find_layers(build(self.configuration(), MODEL_FOR_CAUSAL_LM_MAPPING))
        return known is not None and not any(isinstance(families.read(known, layer), str) for layer in layers)

    @property
    def has_classifier(self) -> bool:
        """Whether transformers has a sequence classifier of it that scores tokens."""
        from rlhf.models.scalar_head import build_scalar_head_class

        return build_scalar_head_class(self.configuration()) is None


FAMILIES = (
    Family("OPT", "opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    Family("GPT-2", "gpt2"),
    Family("GPT-Neo", "gpt_neo", {"attention_types": [[["local", "global"], 1]], "window_size": 5}, "local attention"),
    Family("GPT-J", "gptj", {"rotary_dim": 4}, "eager before transformers 5.24"),
    Family("GPT-NeoX, Pythia", "gpt_neox"),
    Family("BLOOM", "bloom", {}, "alibi"),
    Family("CodeGen", "codegen", {"rotary_dim": 4, "n_ctx": 64}, "eager before transformers 5.24"),
    Family("Llama, Llama 2", "llama"),
    Family(
        "Llama 3",
        "llama",
        GROUPED | {"rope_parameters": LLAMA_3 | {"original_max_position_embeddings": 16}},
        "grouped heads, scaled rope",
    ),
    Family("Mistral", "mistral", GROUPED | WINDOW, "sliding window"),
    Family("Qwen2", "qwen2", PAIRS, "grouped heads"),
    Family("Qwen3", "qwen3", GROUPED, "grouped heads"),
    Family("Gemma", "gemma", GROUPED),
    Family("Gemma 2", "gemma2", GROUPED | MIXED | {"query_pre_attn_scalar": 8}, "soft cap, alternating windows"),
    Family("Gemma 3", "gemma3_text", GROUPED | MIXED, "alternating windows"),
    Family("Phi-3", "phi3", PAIRS | WINDOW, "sliding window"),
    Family("Falcon", "falcon", {}, "one key head for all"),
    Family("Falcon RW", "falcon", {"alibi": True, "multi_query": False}, "alibi"),
    Family("Falcon 40B", "falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}, "grouped heads"),
    Family("StableLM", "stablelm", PAIRS, "grouped heads"),
    Family("MPT", "mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2, "expansion_ratio": 2}, "alibi"),
    Family("BioGPT", "biogpt"),
    Family("Cohere 2", "cohere2", GROUPED | WINDOW, "sliding window"),
    Family("CTRL", "ctrl", {"dff": 48}),
    Family("Falcon-H1", "falcon_h1", GROUPED | MAMBA | {"mamba_d_ssm": 64}, "recurrent layers next to attention"),
    Family("GLM-4", "glm4", GROUPED, "grouped heads"),
    Family("GPT BigCode, StarCoder", "gpt_bigcode", {}, "one key head for all"),
    Family("GPT-OSS", "gpt_oss", GROUPED | MIXED | LOCAL_EXPERTS, "attention sinks, experts"),
    Family("Granite", "granite", GROUPED, "grouped heads"),
    Family("JetMoE", "jetmoe", {"num_key_value_heads": 2, "kv_channels": 8}, "experts"),
    Family("LFM2", "lfm2", PAIRS | {"layer_types": ["conv", "full_attention"]}, "convolutions"),
    Family("Mixtral", "mixtral", GROUPED | LOCAL_EXPERTS, "experts"),
    Family("Nemotron", "nemotron", GROUPED, "grouped heads"),
    Family("OLMo 2", "olmo2", PAIRS, "grouped heads"),
    Family("OLMo 3", "olmo3", PAIRS | MIXED, "alternating windows"),
    Family("Phi, Phi-2", "phi"),
    Family("Phi-3.5 MoE", "phimoe", PAIRS | {"num_local_experts": 4}, "experts, drawn in training", draws=True),
    Family("Qwen3 MoE", "qwen3_moe", GROUPED | EXPERTS, "experts"),
    Family(
        "Qwen3-Next",
        "qwen3_next",
        GROUPED | EXPERTS | {"shared_expert_intermediate_size": 16} | LINEAR,
        "linear attention, experts",
    ),
    Family("Qwen3.5", "qwen3_5_text", GROUPED | LINEAR, "linear attention"),
    Family("SmolLM3", "smollm3", PAIRS, "grouped heads"),
    Family("StarCoder 2", "starcoder2", PAIRS, "grouped heads"),
    Family(
        "Zamba 2",
        "zamba2",
        GROUPED
        | {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2}
        | {"n_mamba_heads": 8, "mamba_headdim": 8, "mamba_d_state": 8, "mamba_ngroups": 1},
        "recurrent layers next to attention",
    ),
)
BY_NAME = {family.name: family for family in FAMILIES}
OFTEN = {"OPT", "GPT-2", "BLOOM", "Llama 3", "Gemma 2", "Falcon"}
"""Those that the default suite trains: one of each kind."""
EACH = mark_slow(BY_NAME, except_for=OFTEN)
"""The families as parameters of a test; those of the long tail only if all tests run."""


@functools.cache
def cpu() -> Any:
    """The CPU backend; looking for backends takes as long as building a model."""
    import accelerators

    return accelerators.select("cpu", environ={}).create()


def build(config: Any, mapping: Any, seed: int = 0) -> Any:
    """A model with random weights, on the attention that the CPU gives it."""
    import torch

    from rlhf.models.compatibility import choose_attention_for

    config._attn_implementation = choose_attention_for(cpu(), config, "tiny", mapping[type(config)]).name
    torch.manual_seed(seed)
    model = mapping[type(config)](config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)  # far from uniform, so that what attention sees matters
    return model
