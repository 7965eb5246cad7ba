"""The index of stand-ins, made once."""

from pathlib import Path

import pytest

from tests.installing import places


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that pip takes for its index."""
    return places.index(tmp_path_factory.mktemp("wheels"))
