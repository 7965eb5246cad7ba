"""example_scripts/python: the page is typed in from top to bottom and shows what comes out; so is its notebook."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cells import ROOT, run_cells
from tests.helpers import user_environment

FOLDER = ROOT / "example_scripts/python"
PAGE = (FOLDER / "README.md").read_text(encoding="utf-8")
NOTEBOOK = json.loads((FOLDER / "own_loop.ipynb").read_text(encoding="utf-8"))


def shown() -> list[tuple[str, str]]:
    """(code, the output that the page shows below it) of each block that is typed in."""
    blocks = re.findall(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", PAGE, re.MULTILINE | re.DOTALL)
    assert len(blocks) == PAGE.count("```python\n") > 5 and PAGE.count("```text") == sum(
        bool(text) for _, text in blocks
    )
    return blocks


def test_the_notebook_is_the_page() -> None:
    writer = runpy.run_path(str(FOLDER / "notebook.py"))
    assert (FOLDER / "own_loop.ipynb").read_text(encoding="utf-8") == writer["text"](PAGE), "run notebook.py"
    code = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
    assert code == [block.strip() for block, _ in shown()]


def test_the_notebook_is_of_nbformat_4() -> None:
    assert (NOTEBOOK["nbformat"], NOTEBOOK["nbformat_minor"]) == (4, 5)
    identities = [cell["id"] for cell in NOTEBOOK["cells"]]
    assert len(set(identities)) == len(identities) and all(re.fullmatch(r"[\w-]{1,64}", name) for name in identities)
    for cell in NOTEBOOK["cells"]:
        own = {"execution_count", "outputs"} if cell["cell_type"] == "code" else set()
        assert cell.keys() == {"cell_type", "id", "metadata", "source"} | own
        assert all(isinstance(line, str) for line in cell["source"])


@pytest.mark.slow
def test_page_shows_the_actual_output(tmp_path: Path) -> None:
    """The notebook's cells in one namespace; what a cell shows ends with what the page says."""
    code = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
    cells = run_cells(code, tmp_path)
    for (block, expected), (printed, error) in zip(shown(), cells):
        assert error is None, f"{block}\n{error}\n{printed}"
        lines = [line for line in printed.splitlines() if ": warning: " not in line]  # of numbers, which rounding moves
        assert "\n".join(lines).rstrip().endswith(expected.rstrip()), f"{block}\n{printed}"
    assert len(cells) == len(code)
    assert (tmp_path / "runs/mine/ppo/stage.json").is_file()


@pytest.mark.slow
def test_the_program_of_the_page_runs_under_torchrun(tmp_path: Path) -> None:
    (program,) = re.findall(r"^```python file=loop.py\n(.*?)^```\n", PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / "loop.py").write_text(program, encoding="utf-8")
    (words,) = re.findall(r"^    torchrun (.*)$", PAGE, re.MULTILINE)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *words.split()]
    environment = user_environment() | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    assert len(re.findall(r"^step \d: \d+ tokens$", done.stdout, re.MULTILINE)) == 2
    assert (tmp_path / "runs/two/ppo/model/config.json").is_file()
