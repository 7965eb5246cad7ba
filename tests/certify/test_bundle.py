"""The bundle of a certificate contains no secrets."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from rlhf.certify.bundle import Redactor, without_secrets, write_bundle
from rlhf.certify.environment import listed_variables


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_ID", "DB_PASSWORD", "PGPASS", "XAUTHORITY"]
)
def test_variables_with_secret_names_are_dropped(name: str) -> None:
    assert without_secrets({name: "value", "PT_MODE": "1"}) == {"PT_MODE": "1"}


@pytest.mark.parametrize(
    "name",
    [
        *("TOKENIZERS_PARALLELISM", "PT_HPU_LAZY_MODE", "GC_KERNEL_PATH", "LD_LIBRARY_PATH"),
        *("NCCL_IB_PKEY", "GC_ENABLE_PASSES", "NO_PROXY_BYPASS", "DESKTOP_SESSION"),
    ],
)
def test_variables_of_libraries_are_no_secrets(name: str) -> None:
    assert without_secrets({name: "value"}) == {name: "value"}


def test_only_variables_with_listed_prefixes_are_recorded() -> None:
    environ = {"PT_B": "2", "PT_A": "1", "PT_TOKEN": "hidden", "ODD": "hidden", "MY_PT_C": "hidden"}
    assert list(listed_variables(environ, ("PT_",)).items()) == [("PT_A", "1"), ("PT_B", "2")]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("token hf_abcdef in a line", "token *** in a line"),
        ("https://me:pass@host/simple", "https://***@host/simple"),
        ("/home/me/run and /home/me", "~/run and ~"),
        ("/home/menu, /opt/home/me", "/home/menu, /opt/home/me"),
    ],
)
def test_redactor_cleans_texts(text: str, expected: str) -> None:
    assert Redactor({"HF_TOKEN": "hf_abcdef", "HOME": "/home/me"}).clean(text) == expected


def test_secret_is_found_however_json_would_write_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", 'gehe"im\\ü')
    monkeypatch.setenv("KEY_SECONDS", "100000")
    report = {"checks": [{"reason": 'bad gehe"im\\ü', "memory": 100000}], 'gehe"im\\ü': None}
    write_bundle(tmp_path / "bundle.zip", report, {}, tmp_path)
    with zipfile.ZipFile(tmp_path / "bundle.zip") as bundle:
        assert json.loads(bundle.read("report.json")) == {
            "checks": [{"reason": "bad ***", "memory": 100000}],
            "***": None,
        }


def test_short_values_are_words() -> None:
    assert Redactor({"USE_AUTH": "1"}).clean("1 of 10") == "1 of 10"


def test_bundle_has_report_environment_and_shortened_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "sk-12345678")
    (tmp_path / "a.log").write_text("begin sk-12345678 " + "x" * 2**21 + " end")
    path = tmp_path / "bundle.zip"
    write_bundle(path, {"reason": "sk-12345678"}, {"system": "Linux"}, tmp_path)
    with zipfile.ZipFile(path) as bundle:
        texts = {name: bundle.read(name).decode() for name in bundle.namelist()}
    assert json.loads(texts["report.json"]) == {"reason": "***"}
    assert json.loads(texts["environment.json"]) == {"system": "Linux"}
    log = texts["logs/a.log"]
    assert log.startswith("begin *** x") and log.endswith("x end") and len(log) < 2**20 + 20
