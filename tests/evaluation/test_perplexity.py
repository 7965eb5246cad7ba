"""`rlhf evaluate --text` foretells what plain transformers foretells, token by token."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf.evaluation.perplexity import split_windows
from tests.evaluation.conftest import Evaluate, documented_keys, lines, printed_json

ROWS = [
    {"prompt": "cow", "response": "moo please"},
    {"prompt": "dog or owl", "response": "woof woof hoot thanks no"},
    {"prompt": "red", "response": "blue green"},
]


@pytest.fixture(scope="module")
def model(model_folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float64).eval()


def plain_nll(model: Any, ids: list[int], first: int) -> float:
    """-log p of the tokens from `first` on, in float64 and without padding."""
    with torch.no_grad():
        log_probs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return -sum(float(log_probs[place - 1, ids[place]]) for place in range(first, len(ids)))


def of_row(tokenizer: Any, row: dict[str, str]) -> tuple[list[int], int]:
    """A row's tokens by the tokenizer's own template, and how many are the prompt's."""
    turns = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["response"]}]
    options = {"return_dict": True, "tokenize": True}
    prompt = tokenizer.apply_chat_template(turns[:1], add_generation_prompt=True, **options)["input_ids"]
    return tokenizer.apply_chat_template(turns, **options)["input_ids"], len(prompt)


@pytest.mark.parametrize("loss_on", ["completion", "all"])
def test_perplexity_is_that_of_transformers(
    evaluate: Evaluate, model_folder: Path, model: Any, tokenizer: Any, tmp_path: Path, loss_on: str
) -> None:
    file = lines(tmp_path / "rows.jsonl", ROWS)
    document = printed_json(
        evaluate(model_folder, "--text", file, "--json", "--rows", "--batch-size", 2, "--set", f"sft.loss_on={loss_on}")
    )
    (numbers,) = document["models"]
    assert numbers.keys() == documented_keys("text")
    written = [of_row(tokenizer, row) for row in ROWS]
    starts = [prompt if loss_on == "completion" else 1 for _, prompt in written]
    expected = [plain_nll(model, ids, start) for (ids, _), start in zip(written, starts, strict=True)]
    tokens = [len(ids) - start for (ids, _), start in zip(written, starts, strict=True)]
    assert [entry["nll"] for entry in numbers["each"]] == pytest.approx(expected, rel=1e-5)
    assert [entry["tokens"] for entry in numbers["each"]] == tokens
    assert (numbers["rows"], numbers["tokens"]) == (3, sum(tokens))
    assert numbers["loss"] == pytest.approx(sum(expected) / sum(tokens), rel=1e-5)
    assert numbers["perplexity"] == pytest.approx(math.exp(sum(expected) / sum(tokens)), rel=1e-4)
    size = sum(len(row["response"]) for row in ROWS)
    bits = sum(expected) / math.log(2) / size if loss_on == "completion" else None
    assert numbers["bits_per_byte"] == (bits if bits is None else pytest.approx(bits, rel=1e-5))


@pytest.mark.parametrize("length", [5, 8, 9, 13, 31])
@pytest.mark.parametrize("first", [1, 4, 11])
def test_windows_predict_each_token_once_from_half_a_window(length: int, first: int) -> None:
    ids, room, seen = list(range(length)), 8, []
    for window in split_windows(ids, first, room):
        assert len(window.ids) <= room and window.ids == ids[window.ids[0] : window.ids[-1] + 1]
        for place in range(window.first, len(window.ids)):
            seen.append(window.ids[place])
            assert place >= min(window.ids[place], room // 2)
    assert seen == ids[first:]


def test_a_long_text_is_read_in_windows(
    evaluate: Evaluate, model_folder: Path, model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    """The model has room for 128 tokens; of each token after those, it sees from 64 to 127 before."""
    text = " ".join(["cow moo please", "dog says no ü", "blue owl"] * 30)
    (tmp_path / "book.txt").write_text(text, encoding="utf-8")
    (numbers,) = printed_json(evaluate(model_folder, "--text", tmp_path / "book.txt", "--json"))["models"]
    ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    assert len(ids) > 300 and numbers["tokens"] == len(ids) - 1
    expected, done = plain_nll(model, ids[:128], 1), 128
    while done < len(ids):
        expected += plain_nll(model, ids[done - 64 : done + 64], 64)
        done += 64
    assert numbers["loss"] == pytest.approx(expected / (len(ids) - 1), rel=1e-5)
    assert numbers["bits_per_byte"] == pytest.approx(expected / math.log(2) / len(text.encode()), rel=1e-5)
    rows = lines(tmp_path / "books.jsonl", [{"body": text}])
    columns = json.dumps({"path": str(rows), "columns": {"text": "body"}})
    assert printed_json(evaluate(model_folder, "--text", columns, "--json"))["models"][0]["loss"] == numbers["loss"]


def test_texts_of_the_wrong_kind_are_errors(evaluate: Evaluate, model_folder: Path, tmp_path: Path) -> None:
    for name, content, message in (
        ("empty.txt", b" \n", "empty.txt: has no text"),
        ("latin.txt", b"\xe4", "latin.txt: is not UTF-8 text"),
        ("empty.jsonl", b"", "empty.jsonl: no usable row"),
        ("prompts.jsonl", b'{"prompt": "a"}', "1 no demonstration"),
        ("page.html", b"a", "unknown kind of file"),
    ):
        (tmp_path / name).write_bytes(content)
        assert message in str(evaluate(model_folder, "--text", tmp_path / name).exception)
    assert "check --text" in str(evaluate(model_folder, "--text", tmp_path / "absent.txt").exception)


def test_a_likelihood_that_is_no_number_is_an_error(
    evaluate: Evaluate, model_folder: Path, tokenizer: Any, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    broken = AutoModelForCausalLM.from_pretrained(model_folder)
    broken.model.norm.weight.data.fill_(math.nan)
    broken.save_pretrained(tmp_path / "broken")
    tokenizer.save_pretrained(tmp_path / "broken")
    done = evaluate(tmp_path / "broken", "--text", lines(tmp_path / "rows.jsonl", ROWS))
    assert "the likelihood of rows.jsonl:1 is not finite in fp32" in str(done.exception)
