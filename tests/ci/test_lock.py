"""ci/lock/py311.txt: every requirement in an admitted version, each with its hashes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LOCK = re.sub(r"\\\n\s*", "", (ROOT / "ci" / "lock" / "py311.txt").read_text())
LOCKED = {name: (version, rest) for name, version, rest in re.findall(r"^(\S+)==(\S+)(.*)$", LOCK, re.MULTILINE)}


def test_every_requirement_is_locked_in_an_admitted_version() -> None:
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needs = [Requirement(text) for text in (*project["dependencies"], *extras["test"], *extras["dev"])]
    needs += [
        Requirement(text) for need in needs if need.name == "rlhf" for part in need.extras for text in extras[part]
    ]
    assert len(needs) > 15
    for need in needs:
        if need.name not in ("torch", "rlhf"):  # torch's build depends on the machine
            assert need.specifier.contains(LOCKED[canonicalize_name(need.name)][0]), f"{need}; run ci/lock.sh"


def test_every_package_has_hashes_and_none_is_of_torch() -> None:
    assert len(LOCKED) > 60
    assert [name for name, (_, rest) in LOCKED.items() if "--hash=sha256:" not in rest] == []
    assert not LOCKED.keys() & {"torch", "triton", "nvidia-cublas", "cuda-toolkit"}
