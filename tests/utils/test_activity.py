"""What the main thread does, as another thread sees it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from rlhf.launchers import exit_status
from rlhf.utils import activity
from rlhf.utils.activity import describe_activity


def test_stage_step_phase_and_line_are_named_but_not_those_of_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []

    def look(*arguments: object) -> None:
        thread = threading.Thread(target=lambda: found.append(describe_activity()))
        thread.start()
        thread.join()

    monkeypatch.setattr(activity, "activity", activity.Activity("ppo", 12, "scoring"))
    file = Path(activity.__file__).parents[1] / "models" / "file.py"
    exec(compile("\nlook()", str(file), "exec"), {"look": look})
    monkeypatch.setattr(exit_status, "as_resource_error", look)
    exit_status.ExitStatus.summarize(ValueError())
    assert found == ["ppo step 12, scoring, rlhf/models/file.py:2 (<module>)", ""]
