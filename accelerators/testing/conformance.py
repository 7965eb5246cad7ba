"""The checks as tests for pytest."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from accelerators.testing.checks import CHECKS, Check, Subject


class Conformance:
    """Subclass it as `TestSomething` and name the backend.

    The backend is selected, created and bound to local rank 0 once for all checks that run in this process.
    """

    name: str
    """The backend's name in `rlhf accelerators list`; it must be available here."""

    @pytest.fixture(scope="class")
    def subject(self, request: pytest.FixtureRequest) -> Iterator[Subject]:
        """Yield the backend, whose environment is set until the last check has ended."""
        with Subject(request.cls.name) as subject:
            yield subject

    @pytest.mark.parametrize("check", CHECKS, ids=str)
    def test_conformance(self, check: Check, subject: Subject, record_property: Callable[[str, object], None]) -> None:
        """Run one check."""
        if note := check.run(subject):
            record_property("note", note)
