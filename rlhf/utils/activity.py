"""What the main thread of this process is doing, for messages about a process that hangs."""

from __future__ import annotations

import sys
import threading
import traceback
from dataclasses import dataclass
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]


@dataclass
class Activity:
    """The stage, step (from 1) and phase that run; the main thread writes them, other threads read them."""

    stage: str = ""
    step: int = 0
    phase: str = ""


activity = Activity()


def describe_activity() -> str:
    """Return what the main thread is doing: `ppo step 12, scoring, rlhf/trainers/ppo/trainer.py:330 (score)`.

    Empty if it is ending the run (`rlhf.launchers`), which says nothing about the place where it waited.
    """
    step = f"{activity.stage} step {activity.step}" if activity.step else activity.stage
    frames = traceback.walk_stack(sys._current_frames().get(threading.main_thread().ident or 0))
    files = [(Path(frame.f_code.co_filename), line, frame.f_code.co_name) for frame, line in frames]
    ours = [(file.relative_to(_PACKAGE), line, name) for file, line, name in files if file.is_relative_to(_PACKAGE)]
    if any(file.parts[0] == "launchers" for file, *_ in ours):
        return ""
    place = [f"{_PACKAGE.name}/{file}:{line} ({name})" for file, line, name in ours[:1]]
    return ", ".join(filter(None, [step, activity.phase, *place]))
