"""The families as parameters of a test; those of the long tail only where all tests run."""

import pytest

from tests.families.table import FAMILIES

EACH = [pytest.param(family, id=family.name, marks=[pytest.mark.slow] if family.slow else []) for family in FAMILIES]
