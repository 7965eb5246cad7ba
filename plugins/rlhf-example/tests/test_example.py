"""All that rlhf asks of a backend; add tests of your own below."""

from accelerators.testing import Conformance


class TestExample(Conformance):
    name = "example"
