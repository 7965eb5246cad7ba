"""Reward models that DeepSpeed-Chat saved give the scores that its own module gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlhf.config.schema import ModelConfig
from rlhf.errors import ModelError
from rlhf.models.forward import ScalarHead, sequence_scores
from rlhf.models.loading import load_causal_lm, load_on_meta, load_scalar_head
from tests.helpers import build_tokenizer

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 128}
FAMILIES: dict[str, dict[str, Any]] = {
    "opt": SIZES | {"ffn_dim": 48, "word_embed_proj_dim": 16, "do_layer_norm_before": False},  # as OPT-350m
    "llama": SIZES | {"intermediate_size": 48, "num_key_value_heads": 2},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "gpt_neo": {
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "intermediate_size": 48,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 8,
        "max_position_embeddings": 128,
    },
    "gpt_neox": SIZES | {"intermediate_size": 48},
    "granite": SIZES | {"intermediate_size": 48, "num_key_value_heads": 2},  # has no classifier in transformers
}


class RewardModel(nn.Module):
    """DeepSpeed-Chat's module, as far as it scores."""

    def __init__(self, base: Any, pad: int) -> None:
        super().__init__()
        size = getattr(base.config, "word_embed_proj_dim", None) or base.config.hidden_size
        self.v_head = nn.Linear(size, 1, bias=False)
        self.rwtransformer = base
        self.pad = pad

    @torch.no_grad()
    def scores(self, row: list[int]) -> Tensor:
        """[T], of every token."""
        hidden = self.rwtransformer(torch.tensor([row]), attention_mask=torch.ones(1, len(row)), use_cache=False)[0]
        return self.v_head(hidden)[0, :, 0]

    def end_score(self, prompt: list[int], reply: list[int], width: int) -> Tensor:
        """The score of a reply, padded to `width`: it is read before the first padding after the prompt."""
        row = prompt + reply + [self.pad] * (width - len(prompt + reply))
        end = next((place for place in range(len(prompt), width) if row[place] == self.pad), width)
        return self.scores(row[:end])[-1]


def saved(
    folder: Path, family: str, *, spelled: str = "rwtransformer.", before: str = "", **changes: Any
) -> RewardModel:
    """A folder as `save_hf_format` leaves it."""
    from transformers import CONFIG_MAPPING, MODEL_MAPPING

    tokenizer = build_tokenizer()
    size = -8 * (-len(tokenizer) // 8)
    ids = {"pad_token_id": 1, "bos_token_id": None, "eos_token_id": 1}
    config = CONFIG_MAPPING[family](vocab_size=size, **FAMILIES[family], **ids)
    torch.manual_seed(0)
    model = RewardModel(MODEL_MAPPING[type(config)](config).eval(), pad=0 if family == "llama" else 1)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    state = {before + name.replace("rwtransformer.", spelled): tensor for name, tensor in model.state_dict().items()}
    folder.mkdir(parents=True)
    torch.save(state | changes, folder / "pytorch_model.bin")
    config.to_json_file(folder / "config.json")
    tokenizer.save_pretrained(folder)
    return model


def load(folder: Path, **options: Any) -> Any:
    return load_scalar_head(ModelConfig(), build_tokenizer(), attention="eager", path=str(folder), **options).eval()


PROMPT, REPLIES = [5, 6, 7], [[8, 9, 1], [10, 1], [1], [11, 12, 13, 14]]


OLD_BUFFER = {"rwtransformer.h.0.attn.masked_bias": torch.tensor(-1e4)}  # older transformers saved it


@pytest.mark.parametrize(
    ("family", "options"),
    [
        *((family, {}) for family in FAMILIES),
        ("opt", {"spelled": "rwtranrsformer.", "before": "module."}),
        ("opt", {"before": "module.module."}),
        ("gpt2", OLD_BUFFER),
    ],
)
def test_tokens_and_replies_score_as_in_deepspeed_chat(tmp_path: Path, family: str, options: Any) -> None:
    theirs = saved(tmp_path / "reward", family, **options)
    lines: list[str] = []
    model = ScalarHead(load(tmp_path / "reward", say=lines.append))
    rows = [PROMPT + reply for reply in REPLIES]
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    with torch.no_grad():
        scores, ends = model(ids, mask), sequence_scores(model, ids, mask)
    for place, row in enumerate(rows):
        expected = theirs.scores(row)
        assert expected.std() > 0.03
        torch.testing.assert_close(scores[place, : len(row)], expected, atol=2e-5, rtol=1e-4)
    expected = torch.stack([theirs.end_score(PROMPT, reply, width) for reply in REPLIES])
    torch.testing.assert_close(ends, expected, atol=2e-5, rtol=1e-4)
    note = "is a reward model of DeepSpeed-Chat; replies are scored at the token before their end"
    assert lines == ([] if family == "llama" else [f"note: {tmp_path}/reward: {note}"])


def test_trained_further_its_ends_are_scored(tmp_path: Path) -> None:
    theirs = saved(tmp_path / "reward", "opt")
    model = load(tmp_path / "reward", seed=0)
    assert torch.equal(model.score.weight, theirs.v_head.weight)
    model.save_pretrained(tmp_path / "ours")
    ids, mask = torch.tensor([PROMPT + REPLIES[0]]), torch.ones(1, 6, dtype=torch.long)
    head = ScalarHead(load(tmp_path / "ours"))
    with torch.no_grad():
        assert torch.equal(sequence_scores(head, ids, mask), head(ids, mask)[:, -1])


def test_refusals_name_deepspeed_chats_tensors(tmp_path: Path) -> None:
    saved(tmp_path / "reward", "opt")
    with pytest.raises(ModelError, match=r"is a reward model .* name a language model"):
        load_causal_lm(ModelConfig(path=str(tmp_path / "reward")), build_tokenizer(), attention="eager")
    path = tmp_path / "reward" / "pytorch_model.bin"
    state = torch.load(path)
    for name in ("v_head.weight", "rwtransformer.decoder.project_out.weight"):
        torch.save({key: tensor for key, tensor in state.items() if key != name}, path)
        with pytest.raises(ModelError) as caught:
            load_on_meta(str(tmp_path / "reward"), ModelConfig(), attention="eager", scalar_head=True)
        assert name in str(caught.value) and "DeepSpeed-Chat" in str(caught.value)
