"""The conformance kit: the promises of every backend, as checks that any plugin can run.

A plugin's tests inherit the checks, and need nothing else but pytest:

    from accelerators.testing import Conformance

    class TestMyChip(Conformance):
        name = "mychip"

`rlhf accelerators check mychip` runs the same checks through `run`, without pytest. Neither imports torch before the
backend is selected.
"""

from typing import TYPE_CHECKING, Any

from accelerators.testing.checks import CHECKS
from accelerators.testing.first_contact import COMPARISONS, compare_with_cpu
from accelerators.testing.numerics import compare_operations, compare_operators
from accelerators.testing.runner import Result, run

if TYPE_CHECKING:
    from accelerators.testing.conformance import Conformance

__all__ = [
    "CHECKS",
    "COMPARISONS",
    "Conformance",
    "Result",
    "compare_operations",
    "compare_operators",
    "compare_with_cpu",
    "run",
]


def __getattr__(name: str) -> Any:
    if name == "Conformance":  # its module imports pytest
        from accelerators.testing.conformance import Conformance

        return Conformance
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
