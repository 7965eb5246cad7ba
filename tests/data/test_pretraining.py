"""Raw text becomes rows of one length: nothing is lost but the rest, and nothing is added but ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf.config.schema import Config, build_config
from rlhf.data.pretraining import fingerprint_documents, pack_documents, read_documents
from rlhf.errors import DataError
from tests.data.rows import write_jsonl
from tests.helpers import build_tokenizer


class Numbers:
    """A tokenizer of texts like "5 6 7"; 1 ends them, and 0 begins them where it is asked to."""

    eos_token_id = 1

    def __init__(self, *, begins: bool = False) -> None:
        self.bos_token, self.bos_token_id = ("0 ", 0) if begins else (None, None)

    def __call__(self, text: Any, add_special_tokens: bool = True, **_: Any) -> dict[str, Any]:
        if isinstance(text, str):  # where the tokenizer starts a text
            start = [0] if self.bos_token and add_special_tokens else []
            return {"input_ids": [*start, 9]}
        return {"input_ids": [[int(number) for number in document.split()] for document in text]}


def configuration(*paths: Any, length: int = 4, batch: int = 1, **data: Any) -> Config:
    ppo = {"ptx_coef": 1.0, "ptx_length": length, "ptx_batch_size": batch}
    return build_config({"data": {"pretraining": list(paths), **data}, "ppo": ppo})


def packed(texts: list[str], *, max_rows: int | None = None, begins: bool = False, **changes: Any) -> list[list[int]]:
    return list(pack_documents(configuration(**changes), texts, Numbers(begins=begins), max_rows=max_rows))  # type: ignore[arg-type]


def test_document_ends_once_and_is_cut_where_the_row_is_full() -> None:
    assert packed(["5 6 7 8 9 10 11"]) == [[5, 6, 7, 8], [9, 10, 11, 1]]
    assert packed(["5 6 7 1"] * 2) == [[5, 6, 7, 1]] * 2  # it brings its end
    assert packed(["5 6 7 8 9"]) == [[5, 6, 7, 8]]  # 9 and its end are the rest
    assert packed(["5 6"], begins=True) == [[0, 5, 6, 1]]
    assert len(packed(["5 6 7"] * 90)) == 90 and len(packed(["5 6 7"] * 90, max_rows=3)) == 3


def test_documents_are_packed_in_a_seeded_order() -> None:
    texts = [" ".join([str(n)] * (2 + n % 4)) for n in range(10, 40)]
    rows = packed(texts, length=5)
    whole = [token for row in rows for token in row]
    every = sum(len(text.split()) + 1 for text in texts)
    assert len(rows) == every // 5 and {len(row) for row in rows} == {5}
    documents = " ".join(map(str, whole)).split(" 1 ")
    assert set(documents[:-1]) <= set(texts)  # each in one piece, between ends
    assert len(documents) >= len(texts) - 2 and documents[0] != texts[0]
    assert rows == packed(texts, length=5)
    other = build_config({"seed": 5, "ppo": {"ptx_coef": 1.0, "ptx_length": 5, "ptx_batch_size": 1}})
    assert rows != list(pack_documents(other, texts, Numbers()))  # type: ignore[arg-type]


def test_too_little_text_is_an_error() -> None:
    with pytest.raises(DataError) as caught:
        packed(["5 6 7 8 9 10", "5 6"], batch=3)
    assert str(caught.value) == (
        "data.pretraining: 10 tokens make 2 rows of 4 (ppo.ptx_length), but an update needs 3 "
        "(ppo.ptx_batch_size); add text, or lower these settings"
    )


def test_row_length_defaults_to_prompt_and_completion() -> None:
    config = build_config({"data": {"max_prompt_length": 3, "max_completion_length": 2}, "ppo": {"ptx_coef": 1}})
    rows = pack_documents(config, ["5 6 7 8"] * 40, Numbers())  # type: ignore[arg-type]
    assert rows.length == 5 and len(rows) == 40 and rows.tokens == 200
    with pytest.raises(IndexError):
        rows[40]


def write_texts(path: Path, column: str, *texts: Any) -> str:
    return write_jsonl(path, [{column: text} for text in texts])


def test_every_source_is_read_and_empty_values_are_dropped(tmp_path: Path) -> None:
    from datasets import Dataset

    Dataset.from_dict({"text": ["c", "d"]}).save_to_disk(tmp_path / "saved")
    first = write_texts(tmp_path / "a.jsonl", "text", "a", "", None, 3, "b\n")
    other = {"path": write_texts(tmp_path / "b.jsonl", "body", "e", "f"), "text": "body"}
    assert read_documents(configuration(first, str(tmp_path / "saved"), other)) == ["a", "b\n", "c", "d", "e", "f"]
    long = write_texts(tmp_path / "c.jsonl", "text", *"abcdefgh")
    limited = read_documents(configuration({"path": long, "limit": 3}))
    assert len(limited) == 3 and limited == sorted(limited)
    config = build_config({"data": {"pretraining": long}})
    assert [source.path for source in config.data.pretraining] == [long]


def test_fingerprint_depends_on_the_documents() -> None:
    assert fingerprint_documents([]) == {}
    documents = (["a", "b"], ["b", "a"], ["a b"], ["a", "c"], ["a", "b", "b"])
    assert len({json.dumps(fingerprint_documents(texts)) for texts in documents}) == 5


def test_rows_of_a_real_tokenizer_decode_to_the_texts() -> None:
    tokenizer = build_tokenizer()
    rows = pack_documents(configuration(length=6), ["red cow please", "moo"] * 5, tokenizer)
    text = tokenizer.decode([token for row in rows for token in row])
    assert text.replace("<eos>", "|").startswith(("red cow please|", "moo|"))
