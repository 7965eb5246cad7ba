"""`rlhf accelerators certify hpu` passes in both modes, and shows no secret."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
from conftest import Run

from rlhf.certify.checks import FIRST_CONTACT

MODES = {"lazy": "1", "eager": "0"}


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_simulated_card_is_certified(python: Run, tmp_path: Path, mode: str) -> None:
    folder = tmp_path / "certificate"
    variables = {"PT_HPU_LAZY_MODE": MODES[mode], "HABANA_TOKEN": "odd-4711-value", "ODD": "odd-4712-value"}
    command = ("-m", "rlhf", "accelerators", "certify", "hpu", "--size", "toy", "--output", str(folder))
    # Not strict: the comparisons read values of the device, which a step must not.
    done = python(*command, strict=False, fresh=True, env=variables, seconds=3000)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(folder / "bundle.zip") as bundle:
        texts = {name: bundle.read(name).decode() for name in bundle.namelist()}
    assert not [name for name, text in texts.items() if "odd-47" in text]
    report, environment = json.loads(texts["report.json"]), json.loads(texts["environment.json"])
    facts = {check["check"]: check["facts"] for check in report["checks"]}
    assert list(facts) == [check.name for check in FIRST_CONTACT]
    assert environment["backend"]["variables"]["PT_HPU_LAZY_MODE"] == MODES[mode]
    assert "a simulation on the CPU" in environment["backend"]["device"]["software"]
    assert facts["decoding"]["llama in bf16"]["recorded by"] == {"lazy": "hpu-graphs", "eager": "torch-compile"}[mode]
    assert facts["zero"]["ZeRO 2 with 2 ranks"]["loss"]
    other = {"lazy": "eager mode", "eager": "lazy mode"}[mode]
    assert len(facts["resume"][other]) == len(facts["resume"]["the CPU"]) == 4
    assert facts["ppo-steps"]["compilations after step 3"] == 0
    assert facts["stages"]["bf16"]["memory"]["ppo"]["parameters"] == 0
