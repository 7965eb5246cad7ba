"""Certify the CPU and both modes of the simulated Gaudi, and write ci/results/certificate-CHIP.json.

    pip install --no-deps --target build/gaudi-sim ./plugins/rlhf-gaudi-sim
    python ci/certificates.py                             # all three, one after the other
    python ci/certificates.py cpu --level numerics        # one level again; the file keeps the others

The files are the certificates that `rlhf accelerators certify` writes at toy size, without disks and paths.
The results name the commit and the date of each level.
tests/certify/test_committed.py compares them with the present levels, checks and lists.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

SITE = ROOT / "build" / "gaudi-sim"
CHIPS: Mapping[str, tuple[str, dict[str, str]]] = {
    "cpu": ("cpu", {}),
    "gaudi-sim-eager": ("hpu", {"RLHF_GAUDI_SIM": "1", "PT_HPU_LAZY_MODE": "0"}),
    "gaudi-sim-lazy": ("hpu", {"RLHF_GAUDI_SIM": "1", "PT_HPU_LAZY_MODE": "1"}),
}
"""The backend and the variables of each file."""


def place(chip: str) -> Path:
    """Return the file of a chip's certificate."""
    return ROOT / "ci" / "results" / f"certificate-{chip}.json"


def certify(chip: str, level: str) -> dict[str, Any]:
    """Run the command, and return the certificate."""
    name, variables = CHIPS[chip]
    if variables and not SITE.is_dir():
        raise SystemExit(f"{SITE}: not there; pip install --no-deps --target build/gaudi-sim ./plugins/rlhf-gaudi-sim")
    paths = [*([str(SITE)] if variables else []), str(ROOT)]
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("RLHF_", "PT_HPU_"))}
    environment |= variables | {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    command = ["accelerators", "certify", name, "--size", "toy", "--level", level, "--output", "certificate"]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "rlhf", *command], cwd=folder, env=environment, check=False)
        text = Path(folder, "certificate", "certificate.json").read_text(encoding="utf-8")
    for folder, name in ((str(ROOT), "ROOT"), (tempfile.gettempdir(), "TEMPORARY")):
        text = text.replace(f"{folder}/", f"{name}/")
    certificate: dict[str, Any] = json.loads(text)
    certificate["environment"].pop("disk", None)
    for entry in certificate["levels"]:
        entry |= {key: certificate[key] for key in ("commit", "date")}
    return certificate


def merge(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Return a certificate with the levels of both, in their order; of a level that both have, the new one."""
    from rlhf.certify.levels import LEVELS

    done = {level["level"] for level in new["levels"]}
    parts = {
        key: [entry for entry in old.get(key, ()) if entry["level"] not in done] + new[key]
        for key in ("levels", "checks")
    }
    order = {level.name: number for number, level in enumerate(LEVELS)}
    for entries in parts.values():
        entries.sort(key=lambda entry: order[entry["level"]])
    tried = [(entry["level"], entry["check"]) for entry in parts["checks"]]
    lacking = [check.name for level in LEVELS for check in level.checks if (level.name, check.name) not in tried]
    passed = not lacking and all(entry["result"] != "failed" for entry in parts["checks"])
    return new | parts | {"not run": lacking, "passed": passed}


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chip", nargs="*", default=[*CHIPS], help=f"default: {', '.join(CHIPS)}")
    parser.add_argument("--level", default="all", help="certify this level again; default: all")
    options = parser.parse_args()
    code = 0
    for chip in options.chip:
        if chip not in CHIPS:
            parser.error(f"{chip}: not known; use {', '.join(CHIPS)}")
        path, certificate = place(chip), certify(chip, options.level)
        old = json.loads(path.read_text(encoding="utf-8")) if path.exists() and options.level != "all" else {}
        path.write_text(json.dumps(merge(old, certificate), indent=1) + "\n", encoding="utf-8")
        failed = [check["check"] for check in certificate["checks"] if check["result"] == "failed"]
        print(f"{path.relative_to(ROOT)}: {', '.join(failed) + ' failed' if failed else 'written'}", flush=True)
        code = 1 if failed else code
    sys.exit(code)


if __name__ == "__main__":
    main()
