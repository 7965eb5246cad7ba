"""The model that the tests of the server share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers import llama


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """A model whose greedy completions do not repeat one token."""
    folder = tmp_path_factory.mktemp("model")
    llama(len(tokenizer), initializer_range=0.5).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
