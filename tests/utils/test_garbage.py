"""While a command imports libraries, nothing is collected, and their objects are exempt; later garbage is collected."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import gc, sys, weakref
from rlhf.utils.garbage import collect_nothing_imported

class Node:
    pass

def cycle():
    node = Node()
    node.itself = node
    return weakref.ref(node)

runs = []
with collect_nothing_imported():
    gc.callbacks.append(lambda phase, info: runs.append(phase))
    kept = [[] for _ in range(100_000)]
    imported = cycle()
    sys.modules["torch"] = sys
    print(len(runs), gc.isenabled())
gc.collect()
print(imported() is not None, gc.isenabled(), gc.get_freeze_count() > 100_000)

later = cycle()
with collect_nothing_imported():
    print(gc.isenabled())
gc.collect()
print(later() is None)
"""


def test_objects_of_the_imports_are_exempt_and_later_ones_are_not() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n") == ["0 False", "True True True", "True", "True", ""]
