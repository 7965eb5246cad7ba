"""The conformance kit: what every backend must do, as a pytest suite that any plugin can run.

A plugin's own tests inherit the checks, and need nothing else:

    from accelerators.testing import Conformance

    class TestMyChip(Conformance):
        name = "mychip"

`rlhf accelerators check mychip` runs the same ones through `run`. Both need pytest (`pip install 'rlhf[test]'`), and
import no torch before the backend is selected.
"""

from accelerators.testing.conformance import Conformance
from accelerators.testing.runner import Result, checks, run

__all__ = ["Conformance", "Result", "checks", "run"]
