"""README's table of families, made of the table that the tests go through (`tests/families/table.py`).

python ci/families.py            print it
python ci/families.py --write    put it into README.md, between its two marks
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
BEGIN, END = "<!-- families: made by ci/families.py -->\n", "<!-- end of families -->\n"


def table() -> str:
    """The table in markdown."""
    sys.path.insert(0, str(ROOT))
    from accelerators.gaudi_kernels import FUSED_SDPA
    from tests.families.table import FAMILIES

    lines = ["| family | in transformers | attention | on `hpu` | what is special |", "|---|---|---|---|---|"]
    for family in FAMILIES:
        attention, on_hpu = family.attention(), family.attention(FUSED_SDPA)
        notes = [*filter(None, [family.notes]), *([] if family.has_classifier else ["scalar head of our own"])]
        lines.append(
            f"| {family.name} | `{family.architecture}` | {attention} | {on_hpu} | {'; '.join(notes) or '-'} |"
        )
    return "\n".join(lines) + "\n"


def written(readme: str) -> str:
    """README with the table between its marks."""
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    if not after:
        raise ValueError(f"README.md lacks the marks {BEGIN.strip()} and {END.strip()}")
    return before + BEGIN + table() + END + after


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        README.write_text(written(README.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        sys.stdout.write(table())
