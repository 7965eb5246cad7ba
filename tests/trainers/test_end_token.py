"""A model whose tokenizer has no end-of-sequence token learns to end with the one that `model.eos_token` adds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import WORDS, build_tokenizer, llama, sets


@pytest.mark.slow
def test_three_stages_from_a_tokenizer_without_an_end(rlhf: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    start, output = tmp_path / "start", tmp_path / "run"
    tokenizer = build_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(start)
    llama(len(tokenizer), eos_token_id=None).save_pretrained(start)
    keys = {
        "model.path": start,
        "model.eos_token": "<|end|>",
        "sft.max_steps": 150,
        "sft.epochs": 20,
        "sft.optimizer.learning_rate": 1e-2,
    }
    settings = sets(*(f"{key}={value}" for key, value in keys.items()))
    printed = rlhf("--stages", "sft,reward", "--output", output, *settings).stdout
    assert "has no end-of-sequence token; added '<|end|>' (id 300), to be learned" in printed
    assert not (output / "ppo").exists()
    rlhf("ppo", "--output", output, recipe=None)
    assert json.loads((output / "ppo" / "stage.json").read_text())["after"]["response_length"] < 16

    model = AutoModelForCausalLM.from_pretrained(output / "sft" / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(output / "sft" / "model")
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|end|>", 300)
    torch.manual_seed(0)
    prompts = tokenizer.apply_chat_template(
        [[{"role": "user", "content": word}] for word in WORDS],
        add_generation_prompt=True,
        padding=True,
        padding_side="left",
        return_tensors="pt",
        return_dict=True,
    )
    with torch.no_grad():  # a reply is 8 words at most
        completions = model.generate(**prompts, do_sample=True, max_new_tokens=60)[:, prompts["input_ids"].shape[1] :]
    assert (completions == 300).any(-1).float().mean() > 0.8
    scorer = AutoModelForSequenceClassification.from_pretrained(output / "reward" / "model")
    assert len(scorer.get_input_embeddings().weight) == len(tokenizer) == 301
