"""The list of planted faults stays true to the code: each still fits, and the tests it names are there."""

import shutil
from pathlib import Path

import pytest

from ci import mutants

ROOT = Path(__file__).parents[1]
FAULTS = mutants.faults()


def test_there_are_many_and_each_has_a_name_of_its_own() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 60


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_can_be_planted(fault: mutants.Fault, tmp_path: Path) -> None:
    for test in fault.tests:
        assert (ROOT / test.partition("::")[0]).exists(), test
    copy = tmp_path / fault.file
    copy.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / fault.file, copy)
    fault.apply(tmp_path)
    text = copy.read_text(encoding="utf-8")
    assert text != (ROOT / fault.file).read_text(encoding="utf-8")
    if fault.file.endswith(".py"):
        compile(text, fault.file, "exec")


def test_a_fault_that_no_longer_fits_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("a = 1\na = 1\n")
    for old, count in (("a = 1", 2), ("b", 0)):
        with pytest.raises(ValueError, match=f"holds its `old` {count} times"):
            mutants.Fault("name", "code.py", old, "", ("tests",)).apply(tmp_path)
