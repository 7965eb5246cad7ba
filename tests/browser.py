"""A real Chromium for tests of pages, through Playwright.

Importing this module skips a test module without Playwright (`pip install playwright`); `MARKS` skip its tests without
a Chromium, in the path or named by the variable CHROMIUM.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
MARKS = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")]


@contextmanager
def chromium() -> Iterator[Any]:
    """Start the browser."""
    with playwright.sync_playwright() as started:
        arguments = ["--no-sandbox", "--disable-quic", "--disable-background-networking"]
        yield started.chromium.launch(executable_path=CHROMIUM, args=arguments)
