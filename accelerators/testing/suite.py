"""What `accelerators.testing.run` lets pytest collect: the checks, for the backend that it was asked about."""

from accelerators.testing.conformance import Conformance


class TestBackend(Conformance):
    """`run` sets its name."""
