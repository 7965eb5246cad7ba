"""Make the table of families in docs/models.md from the table of the tests (`tests/families/table.py`).

python ci/families.py            print it
python ci/families.py --write    write it into the page, between its two marks
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/models.md"
BEGIN, END = "<!-- families: made by ci/families.py -->\n", "<!-- end of families -->\n"


def table() -> str:
    """Return the table in Markdown."""
    sys.path.insert(0, str(ROOT))
    from accelerators.backends.hpu.kernels import FUSED_SDPA
    from tests.families.table import FAMILIES

    lines = ["| family | in transformers | attention | on `hpu` | rollouts on `cpu` | what is special |"]
    lines.append("|---|---|---|---|---|---|")
    for family in FAMILIES:
        attention, on_hpu = family.attention(), family.attention(FUSED_SDPA)
        notes = [*filter(None, [family.notes]), *([] if family.has_classifier else ["scalar head by rlhf"])]
        lines.append(
            f"| {family.name} | `{family.architecture}` | {attention} | {on_hpu} | "
            f"{'C' if family.decodes_in_c else 'operators'} | {'; '.join(notes) or '-'} |"
        )
    return "\n".join(lines) + "\n"


def updated(page: str) -> str:
    """Return the page with the table between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    if not after:
        raise ValueError(f"docs/models.md lacks the marks {BEGIN.strip()} and {END.strip()}")
    return before + BEGIN + table() + END + after


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        sys.stdout.write(table())
