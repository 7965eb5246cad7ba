"""Whatever others may have written is read, in thousands of changed inputs: `RLHF_FUZZ=100000` sets how many.

An input is accepted, or refused with an error that the user can fix. It never ends in another error, takes 30 s or
gigabytes of memory, or writes to another folder.
"""

import os
from pathlib import Path

import datasets
import pytest

from tests.fuzz.bounds import run_bounded
from tests.fuzz.targets import TARGETS

COUNT = int(os.environ.get("RLHF_FUZZ", 100))


@pytest.mark.filterwarnings("ignore:Generating overly large repr")
@pytest.mark.parametrize("name", TARGETS)
def test_changed_input_is_accepted_or_refused_in_one_line(name, tmp_path, capsys):
    inputs, call = TARGETS[name].build(tmp_path)
    # The library reads the variable when it is imported, which another test may have done before it was set.
    caches = [Path(os.environ["HF_DATASETS_CACHE"]), Path(datasets.config.HF_DATASETS_CACHE)]
    counts = run_bounded(inputs, call, max(1, COUNT * TARGETS[name].share // 1000), caches)
    listed = ", ".join(f"{counts[kind]:,} {kind}" for kind in ("refused", "accepted"))
    with capsys.disabled():
        print(f"\nfuzz: {name}: {counts.total():,} inputs, {listed}, 0 tracebacks")
