"""Committed certificates (ci/results/certificate-*.json) are of the present levels, checks and lists."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from accelerators.testing.numerics import entries, errors
from rlhf.certify.levels import LEVELS
from rlhf.certify.page import render_certificate
from rlhf.certify.runner import FORMAT

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "ci"))
import certificates

REMEDY = "run python ci/certificates.py"


@pytest.fixture(params=certificates.CHIPS)
def certificate(request: pytest.FixtureRequest) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(certificates.place(request.param).read_text(encoding="utf-8"))
    return document


def test_certificate_has_passed_every_check_of_today(certificate: dict[str, Any]) -> None:
    expected = [(level.name, check.name, check.expected) for level in LEVELS for check in level.checks]
    found = [(entry["level"], entry["check"], entry["expected"]) for entry in certificate["checks"]]
    assert found == expected, REMEDY
    assert (certificate["format"], certificate["passed"], certificate["not run"]) == (FORMAT, True, []), REMEDY
    assert [level["result"] for level in certificate["levels"]] == ["passed"] * len(LEVELS)
    assert all(level["seconds"] <= (level["limit"] or 1e9) for level in certificate["levels"])


def test_certificate_is_of_the_present_operators_and_tolerances(certificate: dict[str, Any]) -> None:
    table = errors.read_table()
    facts = next(entry["facts"] for entry in certificate["checks"] if entry["check"] == "operators")
    assert facts["operators"] == len({call.operator for call in entries.iterate_calls()}), REMEDY
    assert facts["tolerances"] == table, REMEDY


def test_certificate_names_no_place_of_a_machine(certificate: dict[str, Any]) -> None:
    assert "disk" not in certificate["environment"]
    assert "/work" not in json.dumps(certificate) and "/tmp" not in json.dumps(certificate)


def test_certificate_can_be_shown(certificate: dict[str, Any]) -> None:
    assert f"Certificate of {certificate['accelerator']}" in render_certificate(certificate)


def test_level_that_is_certified_again_replaces_that_level_alone() -> None:
    def part(*levels: str, result: str) -> dict[str, Any]:
        return {
            "levels": [{"level": name, "result": result} for name in levels],
            "checks": [
                {"level": level.name, "check": check.name, "result": result}
                for level in LEVELS
                if level.name in levels
                for check in level.checks
            ],
        }

    names = [level.name for level in LEVELS]
    old, new = part(*names, result="passed"), part("numerics", result="failed")
    merged = certificates.merge(old, new)
    assert [level["result"] for level in merged["levels"]] == [
        "failed" if name == "numerics" else "passed" for name in names
    ]
    assert [entry["check"] for entry in merged["checks"]] == [check.name for level in LEVELS for check in level.checks]
    assert merged["passed"] is False and merged["not run"] == []
    assert certificates.merge(part("interface", result="passed"), part("numerics", result="passed"))["passed"] is False
