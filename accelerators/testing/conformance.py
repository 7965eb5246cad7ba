"""The checks for pytest: what `Suite` asks for, as fixtures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import pytest

from accelerators.testing.suite import STAGES, Subject, Suite

if TYPE_CHECKING:
    from accelerators import Accelerator, Selection
    from accelerators.testing.processes import Outcome


class Conformance(Suite):
    """Subclass it as `TestSomething` and name the backend.

    The backend is selected, created and bound to local rank 0 once for all checks that run in this process.
    """

    @pytest.fixture(scope="class")
    def subject(self, request: pytest.FixtureRequest) -> Iterator[Subject]:
        """What the fixtures below are parts of; its environment is set until the last check has ended."""
        with Subject(request.cls.name) as subject:
            yield subject

    @pytest.fixture(scope="class")
    def selection(self, subject: Subject) -> Selection:
        """The backend's selection."""
        return subject.selection

    @pytest.fixture(scope="class")
    def unbound(self, subject: Subject) -> Accelerator:
        """The backend, whose device is still free for other processes."""
        return subject.unbound

    @pytest.fixture(scope="class")
    def accelerator(self, subject: Subject) -> Accelerator:
        """The backend, bound to local rank 0."""
        return subject.accelerator

    @pytest.fixture(scope="class")
    def deepspeed_report(self, subject: Subject) -> Outcome:
        """What a process with DeepSpeed found out, as far as it got."""
        return subject.deepspeed_report

    @pytest.fixture(params=STAGES, ids="zero-{}".format)
    def stage(self, request: pytest.FixtureRequest) -> int:
        """A ZeRO stage."""
        return int(request.param)

    @pytest.fixture
    def note(self, record_property: Callable[[str, object], None]) -> Callable[[str], None]:
        """Adds a line to the report."""
        return partial(record_property, "note")
