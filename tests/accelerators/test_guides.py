"""The commands of docs/accelerators.md and docs/write-a-backend.md for plugins, run as written."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def commands(document: str, heading: str) -> list[list[str]]:
    """The shell blocks of a section, each the lines of one block."""
    section = (ROOT / document).read_text().split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return [block.strip().splitlines() for block in re.findall(r"```bash\n(.*?)```", section, re.DOTALL)]


@pytest.fixture
def shell(tmp_path: Path):
    """Type lines into a shell in a copy of the repository's plugins, pip installing aside and without a network."""
    repository = tmp_path / "rlhf"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "build", ".pytest_cache")
    shutil.copytree(ROOT / "plugins", repository / "plugins", ignore=ignored)
    site = tmp_path / "site"
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("RLHF_", "PYTEST_"))} | {
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

    def type_in(lines: list[str]) -> str:
        done = subprocess.run(
            ["bash", "-euxc", "\n".join(lines)],
            cwd=repository,
            env=environment,
            capture_output=True,
            text=True,
            timeout=500,
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


def test_template_is_small_and_uses_public_names_only():
    sources = [path.read_text() for path in (ROOT / "plugins" / "rlhf-example" / "rlhf_example").glob("*.py")]
    assert sum(len(source.splitlines()) for source in sources) < 150
    assert {name for source in sources for name in re.findall(r"from (accelerators[\w.]*) import", source)} == {
        "accelerators"
    }
