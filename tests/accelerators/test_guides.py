"""The commands and code for plugins of docs/accelerators.md, add-a-chip.md and write-a-backend.md, run as written."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from accelerators.testing.stand_in import subject
from tests.helpers import user_environment

ROOT = Path(__file__).parents[2]


def commands(document: str, heading: str) -> list[list[str]]:
    """The shell blocks of a section, each the lines of one block."""
    section = (ROOT / document).read_text().split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return [block.strip().splitlines() for block in re.findall(r"```bash\n(.*?)```", section, re.DOTALL)]


def chip_steps() -> Iterator[tuple[str, str]]:
    """Yield the blocks of docs/add-a-chip.md: ("bash", lines), or the name of a file and what is appended to it."""
    for kind, block in re.findall(r"```(\w+)\n(.*?)```", (ROOT / "docs/add-a-chip.md").read_text(), re.DOTALL):
        first, _, text = block.partition("\n")
        yield ("bash", block) if kind == "bash" else (first.removeprefix("# "), text)


def append(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(text)


@pytest.fixture
def shell(tmp_path: Path):
    """Type lines into a shell in a copy of the repository's plugins, pip installing aside and without a network."""
    repository = tmp_path / "rlhf"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "build", ".pytest_cache")
    shutil.copytree(ROOT / "plugins", repository / "plugins", ignore=ignored)
    site = tmp_path / "site"
    user = user_environment().items()
    environment = {key: value for key, value in user if not key.startswith(("RLHF_", "PYTEST_"))} | {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": str(site),
        "PIP_TARGET": str(site),
        "PIP_UPGRADE": "1",  # a target that exists is replaced
        "PIP_NO_DEPS": "1",
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # pip reads this as: no isolation
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_ROOT_USER_ACTION": "ignore",
        "OMP_NUM_THREADS": "1",
    }

    def type_in(lines: list[str], folder: Path = repository) -> str:
        done = subprocess.run(
            ["bash", "-euxc", "\n".join(lines)],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=1500,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    return type_in


@pytest.mark.slow
def test_example_plugin_commands_of_page_pass(shell):
    (lines,) = commands("docs/accelerators.md", "Plugins")
    assert any("accelerators check example" in line for line in lines)
    output = shell(lines)
    assert "rlhf-example 0.1.0" in output
    assert " 0 failed" in output


@pytest.mark.slow  # nearly a minute; it passes the same checks as the page's example, in a copy
def test_backend_from_template_passes_as_page_says(shell, tmp_path):
    ((install, *_),) = commands("docs/accelerators.md", "Plugins")  # leaves a build folder in the template
    (make,) = commands("docs/write-a-backend.md", "Copy the template")
    (prove,) = commands("docs/write-a-backend.md", "Test it")
    output = shell([install, *make, *prove])
    assert "rlhf-mychip 0.1.0" in output
    (record,) = (tmp_path / "site").glob("rlhf_mychip-*.dist-info/RECORD")
    assert "rlhf_example" not in record.read_text()
    assert re.search(r"\d+ passed", output)
    assert " 0 failed" in output


@pytest.fixture
def flint(tmp_path, monkeypatch):
    """Write the files of docs/add-a-chip.md at once, and return the class of its backend."""
    for name, text in chip_steps():
        if name != "bash":
            append(tmp_path / name, text)
    for number in range(2):
        (tmp_path / "driver" / f"flint{number}").mkdir(parents=True)
    monkeypatch.setenv("FLINT_DRIVER", str(tmp_path / "driver"))
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("rlhf_flint.backend").Flint
    for name in [name for name in sys.modules if name.partition(".")[0] == "rlhf_flint"]:
        del sys.modules[name]


CHECK_FLINT = """
import contextlib
from unittest import SkipTest
from accelerators.testing.checks import CHECKS
from accelerators.testing.stand_in import subject
from rlhf_flint.backend import Flint

chip = subject(Flint)
for check in CHECKS:
    if check.module != "processes":
        with contextlib.suppress(SkipTest):
            check.run(chip)
assert chip.accelerator.compilations()  # of the check `capture`
"""


def test_chip_of_the_page_passes_the_checks_that_need_no_other_process(flint, forks, tmp_path):
    plugin = sys.modules["rlhf_flint.plugin"]
    (spec,), found = plugin.rlhf_accelerators(), plugin.probe()
    assert (found.ok, found.count, spec.factory) == (True, 2, "rlhf_flint.backend:Flint")
    # In this process, the CPU's backend may have told the C library to keep freed memory.
    environment = {"PYTHONPATH": str(tmp_path), "FLINT_DRIVER": str(tmp_path / "driver")}
    done = forks.python("-c", CHECK_FLINT, timeout=120, environment=environment)
    assert done.returncode == 0, done.stderr


def test_quirks_of_the_pages_chip_show(flint):
    chip = subject(flint).accelerator
    attend = sys.modules["rlhf_flint.kernels"].attend
    keys = torch.ones(1, 2, 4, 8, dtype=torch.float64)
    with pytest.raises(TypeError, match="FLINT_E_DTYPE"):
        attend(None, keys, keys, keys, None)
    assert chip.is_out_of_memory(RuntimeError("FLINT_E_NO_MEMORY: 3 bytes"))
    assert chip.memory().total == sys.modules["rlhf_flint.runtime"].LIMIT
    assert {chip.shape_policy().length(length, 64) for length in range(1, 65)} == {64}


@pytest.mark.slow  # some minutes: the conformance kit, and three checks of a certificate
def test_steps_of_the_page_lead_to_a_certificate(shell, tmp_path):
    folder, exports, outputs = tmp_path / "rlhf-flint", [], []
    folder.mkdir()
    certify = ("--level all", "--level all --only product --only attention --only operators")
    for name, text in chip_steps():
        if name == "bash":
            text = text.replace(*certify)
            outputs.append(shell([*exports, text], folder))
            exports += [line for line in text.splitlines() if line.startswith("export ")]
        else:
            append(folder / name, text)
    assert "2 x Flint" in outputs[1]
    assert all(" 0 failed" in output for output in outputs if "skipped" in output)
    assert (folder / "certificate" / "certificate.html").exists()
    certificate = json.loads((folder / "certificate" / "certificate.json").read_text())
    assert [check["check"] for check in certificate["checks"]] == ["product", "attention", "operators"]


@pytest.mark.parametrize(("chip", "lines"), [("example", 150), ("xpu", 250), ("npu", 250)])
def test_plugin_is_small_and_uses_public_names_only(chip, lines):
    sources = [path.read_text() for path in (ROOT / "plugins" / f"rlhf-{chip}" / f"rlhf_{chip}").glob("*.py")]
    assert sum(len(source.splitlines()) for source in sources) < lines
    assert {name for source in sources for name in re.findall(r"from (accelerators[\w.]*) import", source)} == {
        "accelerators"
    }
