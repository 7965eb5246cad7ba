"""The table has every flag of the originals, with keys, options and readers that exist."""

from __future__ import annotations

import re
from pathlib import Path

import deepspeed.launcher
import pytest

from rlhf.config.schema import Config
from rlhf.contrib.deepspeed_chat.rules import RULES
from rlhf.contrib.deepspeed_chat.tables import READERS, STEPS, find_flag, load_flags, load_implied, load_variables
from tests.contrib.deepspeed_chat.originals import EARLIER, FLAGS

LAUNCHER = Path(deepspeed.launcher.__file__).with_name("runner.py")


def has_key(key: str) -> bool:
    """Return True if the schema has the key; a mapping of free keys has any."""
    section: object = Config()
    for part in key.split("."):
        if isinstance(section, dict):
            return True
        if not hasattr(section, part):
            return False
        section = getattr(section, part)
    return True


@pytest.mark.parametrize("program", FLAGS)
def test_table_has_every_flag_of_a_program_with_its_default(program: str) -> None:
    assert {name: row.of[program] for name, row in load_flags().items() if program in row.of} == FLAGS[program]


def test_earlier_names_are_known() -> None:
    for program, names in EARLIER.items():
        for before, now in names.items():
            row = find_flag(program, before)
            assert row and row.name == now


def test_table_has_every_flag_of_the_launcher() -> None:
    """The table has the flags of the installed DeepSpeed and of earlier releases."""
    flags = set(re.findall(r'add_argument\(\s*(?:"-\w",\s*)?"(--\w+)"', LAUNCHER.read_text(encoding="utf-8")))
    assert len(flags) > 20
    assert [name for name in flags if not find_flag("deepspeed", name)] == []
    for short in re.findall(r'add_argument\(\s*"(-\w)"', LAUNCHER.read_text(encoding="utf-8")):
        assert find_flag("deepspeed", short), short


def test_each_flag_has_exactly_one_meaning() -> None:
    for row in load_flags().values():
        meanings = [row.keys, row.option, row.command, row.automatic, row.nothing]
        assert sum(map(bool, meanings)) == 1, row.name
        assert not row.reader or row.reader in READERS, row.name
        assert not row.rule or row.rule in RULES, row.name
    assert {row.rule for row in load_flags().values()} - {""} == set(RULES)
    assert {row.reader for row in [*load_flags().values(), *load_variables().values()]} - {""} == set(READERS)


def test_every_key_of_the_tables_exists() -> None:
    keys = {key for row in load_flags().values() for step in STEPS if step in row.of for key in row.keys_of(step)}
    keys |= {implied.key for implied in load_implied()}
    keys |= {key for row in load_variables().values() for keys_of_stage in row.keys.values() for key in keys_of_stage}
    assert len(keys) > 60
    assert [key for key in sorted(keys) if not has_key(key)] == []


def test_variable_stands_for_a_flag_of_its_steps() -> None:
    for row in load_variables().values():
        for stage, flag in row.flags.items():
            assert find_flag(stage, flag), f"{row.name}: {stage} has no {flag}"
