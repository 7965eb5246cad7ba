"""Write own_loop.ipynb from README.md: its prose and its code, block by block.

python example_scripts/python/notebook.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
PAGE, NOTEBOOK = FOLDER / "README.md", FOLDER / "own_loop.ipynb"
_BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)


def cells(page: str) -> list[tuple[str, str]]:
    """("markdown" | "code", source) of each cell; what the page shows of output is left to the notebook.

    A block that is a separate file stays prose.
    """
    found: list[tuple[str, str]] = []
    end = 0
    for block in _BLOCK.finditer(page):
        language, options, source = block.groups()
        if language == "python" and "file=" in options:
            continue
        found.append(("markdown", page[end : block.start()].strip()))
        end = block.end()
        if language == "python":
            found.append(("code", source.strip()))
    found.append(("markdown", page[end:].strip()))
    return [(kind, source) for kind, source in found if source]


def notebook(page: str) -> dict[str, Any]:
    """The page as a notebook of nbformat 4.5."""
    made = []
    for number, (kind, source) in enumerate(cells(page)):
        cell: dict[str, Any] = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}}
        if kind == "code":
            cell |= {"execution_count": None, "outputs": []}
        made.append(cell | {"source": source.splitlines(keepends=True)})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": made, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def text(page: str) -> str:
    """What the file of the notebook holds."""
    return json.dumps(notebook(page), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    NOTEBOOK.write_text(text(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
