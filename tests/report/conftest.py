from __future__ import annotations

import pytest

from rlhf.diagnosis.verdict import ExaminedRun
from tests.report.runs import build_long_run


@pytest.fixture(scope="session")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> ExaminedRun:
    """A run of 1,000 steps of PPO with 21 evaluations of 256 prompts and 100 samples of 200 tokens."""
    return build_long_run(tmp_path_factory.mktemp("long") / "run")
