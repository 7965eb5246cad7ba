"""`rlhf accelerators certify` with real processes: the CPU passes, and checks find faults of a plugin's backend."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from rlhf.certify.checks import FIRST_CONTACT


@pytest.fixture
def certify(run_python, tmp_path: Path):
    """Run the command at toy size; return the end of its process, and the texts of the bundle by name."""

    def run(name: str, *options: str, plugins: tuple[str, ...] = (), **variables: str):
        folder = tmp_path / "certificate"
        path = folder / "bundle.zip"
        command = ("-m", "rlhf", "accelerators", "certify", name, "--size", "toy", "--output", str(folder), *options)
        done = run_python(*command, plugins=plugins, env={"HOME": str(tmp_path), **variables}, seconds=3000)
        if not path.exists():
            return done, {}
        with zipfile.ZipFile(path) as bundle:
            texts = {name: bundle.read(name).decode() for name in bundle.namelist()}
        return done, texts | {name: (folder / name).read_text() for name in ("certificate.json", "certificate.html")}

    return run


@pytest.mark.slow
def test_cpu_is_certified_without_secrets(certify) -> None:
    secrets = {"HF_TOKEN": "hf_secret_4711", "ODD_SETTING": "odd_secret_4711", "RLHF_API_KEY": "sk_secret_4711"}
    done, texts = certify("cpu", "--json", **secrets)
    assert done.returncode == 0, done.stderr
    report = json.loads(texts["report.json"])
    assert json.loads(done.stdout)["checks"] == report["checks"]
    assert [check["check"] for check in report["checks"]] == [check.name for check in FIRST_CONTACT]
    assert all(f"expected: {check.expected}" in done.stderr for check in FIRST_CONTACT)
    assert {name for name, text in texts.items() if "secret_4711" in text} == set()
    assert len(texts) == 4 + 1 + len(FIRST_CONTACT)
    facts = {check["check"]: check["facts"] for check in report["checks"]}
    assert len(facts["ppo-steps"]["steps"]) == 20
    assert {"generation_seconds", "scoring_seconds", "training_seconds"} <= set(facts["ppo-steps"]["steps"][0])


FAULTS = [
    ("product", "aborts when the device is opened", "SIGABRT"),
    ("explain", "cannot clip", "no clip_grad_norm: the uncertain backend has no clip_grad_norm"),
    ("conformance", "answers with another type", "types failed: is_lazy() returns 'no', expected bool"),
    ("stages", "keeps every parameter", "fp32: sft has left 7,686,912 bytes of parameters in memory, expected 0"),
    ("zero", "does not step flattened parameters", "ZeRO 1 with 2 ranks: losses are "),
    ("zero", "does not step adapters", "unchanged adapters after 4 steps"),
    ("resume", "loads no optimizer state", "resumed on this device: losses are "),
    ("ppo-steps", "compiles in every step", "graphs were compiled after step 3, expected none"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("check", "fault", "line"), FAULTS)
def test_fault_of_a_backend_fails_its_check(certify, check: str, fault: str, line: str) -> None:
    done, texts = certify("uncertain", "--only", check, plugins=("uncertain",), FAULT=fault)
    assert done.returncode == 3, done.stderr
    (result,) = json.loads(texts["report.json"])["checks"]
    assert line in result["reason"]
    assert f"{check} failed" in done.stdout and "certificate.html" in done.stdout


@pytest.mark.slow
def test_crash_of_the_device_is_reported_with_its_log(certify) -> None:
    fault = {"FAULT": "aborts when the device is opened"}
    done, texts = certify("uncertain", "--only", "product", plugins=("uncertain",), **fault)
    assert done.returncode == 3
    assert "uncertain (Uncertain): product failed after 0 checks passed: SIGABRT; certificate: " in done.stdout
    assert "[exit code -6]" in texts["logs/01-product.log"]


def test_backend_that_cannot_run_is_refused_in_one_line(certify) -> None:
    done, texts = certify("hpu")
    assert (done.returncode, done.stdout, texts) == (2, "", {})
    assert len(done.stderr.splitlines()) == 1 and "no Gaudi driver" in done.stderr
