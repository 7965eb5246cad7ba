"""Where the prompts of `rlhf compare` come from."""

import json
from pathlib import Path

import pytest

from rlhf.config.schema import Config, build_config
from rlhf.errors import DataError
from rlhf.evaluation.rows import draw_rows, read_lines, read_prompts


def of(path: Path) -> Config:
    return build_config({"data": {"datasets": [str(path)]}})


def texts(name: object) -> list[str]:
    return [row.text for row in read_lines(str(name))]


def test_a_text_file_has_a_prompt_on_each_line(tmp_path: Path) -> None:
    path = tmp_path / "some.txt"
    path.write_bytes("\ufeffone\r\n\n  two\u2028words \nHuman: hi\n".encode())
    assert texts(path) == ["one", "two\u2028words", "Human: hi\n\nAssistant:"]
    assert [row.source for row in read_lines(str(path))] == [f"{path}:{line}" for line in (1, 3, 4)]


def test_data_sets_give_their_prompts_in_every_format(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows: list[dict[str, object]] = [
        {"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "yes"}]},
        {"messages": []},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "two"}]},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts, dropped = read_prompts(of(path))
    assert [[message.content for message in row.prompt] for row in prompts] == [["one"], ["s", "two"]]
    assert dropped == {"empty prompt": (1, "rows.jsonl:2")}


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("empty.txt", b"\n \n", r"has no prompts; name another file with --prompts"),
        ("bytes.txt", b"a\xff", r"is not UTF-8 text \(byte 1\); save it as UTF-8"),
        ("absent.txt", None, r"cannot be read \(No such file or directory\); check the path"),
        ("texts.jsonl", b'{"prompt": ""}', r"has no prompts; name another file with --prompts"),
    ],
)
def test_source_without_prompts_is_an_error(tmp_path: Path, name: str, content: bytes | None, expected: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=rf"{name}: .*{expected}"):
        texts(tmp_path / name) if name.endswith(".txt") else read_prompts(of(tmp_path / name))


def test_prompts_are_drawn_from_all_and_keep_their_order(tmp_path: Path) -> None:
    path = tmp_path / "some.txt"
    path.write_text("".join(f"{number}\n" for number in range(50)))
    rows = read_lines(str(path))
    some = [int(row.text) for row in draw_rows(rows, 10, seed=1)]
    assert some == sorted(set(some)) and len(some) == 10 and max(some) > 25
    assert some != [int(row.text) for row in draw_rows(rows, 10, seed=2)]
    assert draw_rows(rows, 50, seed=1) == rows == draw_rows(rows, 99, seed=2)
