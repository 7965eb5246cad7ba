"""Build the embedded default: a Llama of about three million parameters, from scratch, for the embedded world."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def build_llama_on_meta(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Build the model without its weights, on torch's meta device."""
    with torch.device("meta"):
        return build_llama(tokenizer, attention="sdpa", seed=0, max_length=0)


def build_llama(tokenizer: PreTrainedTokenizerBase, *, attention: str, seed: int, max_length: int) -> PreTrainedModel:
    """Build a Llama with random weights drawn from `seed` and the tokenizer's vocabulary."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=6,
        max_position_embeddings=max(128, max_length),
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        use_cache=False,
        attn_implementation=attention,
    )
    return LlamaForCausalLM(config)
