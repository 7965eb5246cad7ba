"""The tables of docs/deepspeed-chat.md, made of the tables that command lines are translated by.

python ci/migration.py            print them
python ci/migration.py --write    put them into the page, between their marks
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/deepspeed-chat.md"
sys.path.insert(0, str(ROOT))

from rlhf.config.dump import format_scalar  # noqa: E402
from rlhf.contrib.deepspeed_chat.tables import (  # noqa: E402
    Flag,
    Variable,
    load_flags,
    load_implied,
    load_variables,
)

PROGRAMS = {
    "sft": "1",
    "reward": "2",
    "dpo": "DPO",
    "ppo": "3",
    "deepspeed": "launcher",
    "e2e": "e2e",
    "chat": "chat",
    "rw_eval": "rw_eval",
    "prompt_eval": "prompt_eval",
}
"""A program -> its name in the column `of`."""


def flag_table() -> Iterator[str]:
    """All flags, with their steps, defaults there, and what they are here."""
    yield "| flag | of | default there | here |"
    yield "|---|---|---|---|"
    for row in load_flags().values():
        names = ", ".join(f"`{name}`" for name in (row.name, *row.was))
        of = ", ".join(PROGRAMS[program] for program in row.of) + (" (fork)" if row.fork else "")
        yield f"| {names} | {of} | {_defaults(row)} | {_here(row)} |"


def implied_table() -> Iterator[str]:
    """What is so without a flag."""
    yield "| key | value | of | |"
    yield "|---|---|---|---|"
    for one in load_implied():
        of = ", ".join(PROGRAMS[stage] for stage in one.stages)
        yield f"| `{one.key}` | `{_text(one.value)}` | {of} | {one.why} |"


def variable_table() -> Iterator[str]:
    """All variables, with what they are."""
    yield "| variable | the scripts' flag | here |"
    yield "|---|---|---|"
    for name, row in load_variables().items():
        made = ", ".join(f"`{flag}`" for flag in dict.fromkeys(row.flags.values()))
        yield f"| `{name}` | {made or '-'} | {_variable_here(row)} |"


def _defaults(row: Flag) -> str:
    found: dict[str, list[str]] = {}
    for program, value in row.of.items():
        found.setdefault("-" if value in (None, "", []) else f"`{_text(value)}`", []).append(PROGRAMS[program])
    if len(found) == 1:
        return next(iter(found))
    return ", ".join(f"{value} ({', '.join(programs)})" for value, programs in found.items())


def _here(row: Flag) -> str:
    keys = [*row.keys] if not isinstance(row.keys, Mapping) else [key for step in row.keys.values() for key in step]
    fixed = f" = `{_text(row.value)}`" if keys and not row.reader and row.value is not True else ""
    said = ", ".join(f"`{key.format(stage='STAGE')}`" for key in dict.fromkeys(keys)) + fixed
    return _said(row, said or row.command)


def _variable_here(row: Variable) -> str:
    return _said(row, ", ".join(f"`{key}`" for key in dict.fromkeys(key for mine in row.keys.values() for key in mine)))


def _said(row: Flag | Variable, keys: str) -> str:
    """What a row is, in a sentence: its keys, its option, or why it has neither; and the note."""
    option = f"`{row.option}`" if row.option else ""
    why = f"automatic: {row.automatic}" if row.automatic else f"nothing: {row.nothing}"
    return "; ".join(filter(None, [keys or option or why, row.note]))


def _text(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(value)
    return format_scalar(value) if value is not None else "null"


TABLES = {
    "flags": flag_table,
    "implied": implied_table,
    "variables": variable_table,
}


def written(page: str) -> str:
    """The page with the tables between their marks."""
    for name, table in TABLES.items():
        begin, end = f"<!-- {name}: made by ci/migration.py -->\n", f"<!-- end of {name} -->\n"
        before, _, rest = page.partition(begin)
        _, _, after = rest.partition(end)
        if not after:
            raise ValueError(f"{PAGE.name} lacks the marks {begin.strip()} and {end.strip()}")
        lines = (line.replace("<|", "<\\|").replace("|>", "\\|>") + "\n" for line in table())
        page = before + begin + "".join(lines) + end + after
    return page


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        for make in TABLES.values():
            print(*make(), "", sep="\n")
