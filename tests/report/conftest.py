from __future__ import annotations

import pytest

from rlhf.report.contents import RunReport
from tests.report.runs import build_long_run


@pytest.fixture(scope="session")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> RunReport:
    """A run of 1,000 steps of PPO with 21 evaluations of 256 prompts and 100 samples of 200 tokens."""
    return build_long_run(tmp_path_factory.mktemp("long") / "run")
