"""Finding Ascend NPUs by copies of the driver's files and answers of npu-smi."""

from __future__ import annotations

import importlib.util
from importlib import metadata
from pathlib import Path
from subprocess import CompletedProcess, TimeoutExpired

import pytest
from rlhf_npu import plugin

from accelerators import Health, TorchBuild, host

# As published: the command reference of Atlas A2 and A3, and Ascend/msinsight's and xllm's documents.
SMI_910B = """\
\tNPU ID                         Chip ID                        Chip Logic ID                  Chip Name
\t0                              0                              0                              Ascend 910B3
\t0                              1                              -                              Mcu
\t1                              0                              1                              Ascend 910B3
\t1                              1                              -                              Mcu
"""
SMI_A3 = """\
    NPU ID                         Chip ID                        Chip Logic ID                  Chip Phy-ID                    Chip Name
    0                              0                              0                              0                              Ascend910
    0                              1                              1                              1                              Ascend910
    0                              2                              -                              -                              Mcu
"""  # noqa: E501
HEALTH = """\
        Health Status                  : OK
        Error Code                     : NA
        Error Information              : NA
"""
ECC = """\
        Single-bit Error Count                   : 3
        Double-bit Error Count                   : 0
"""
ECC_910B = """\
        DDR Single Bit Error Count               : 0
        DDR Double Bit Error Count               : 0
        DDR Double Bit Aggregate Total Err Cnt   : 0
        HBM Single Bit Error Count               : 5
        HBM Double Bit Error Count               : 2
        HBM Double Bit Aggregate Total Err Cnt   : 9
        HBM Double Bit Isolated Pages Count      : 1
        Chip ID                                  : 0
"""
CHIP_1 = (("-t", "health", "-i", "1", "-c", "0"), ("-t", "ecc", "-i", "1", "-c", "0"))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Write the device files of a machine with these NPUs, and let its tool, torch and torch_npu answer."""
    monkeypatch.setattr(plugin, "DEV", tmp_path)
    monkeypatch.setattr(plugin, "DRIVER", tmp_path / "version.info")
    monkeypatch.delenv(plugin.VISIBLE, raising=False)
    monkeypatch.setenv(plugin.HOME, "/usr/local/Ascend/ascend-toolkit/latest")

    def write(
        *numbers: int,
        smi: str | Exception = SMI_910B,
        state: dict[tuple[str, ...], str] | None = None,
        torch="2.13.0+cpu",
        extension: str | None = "2.13.0.post2",
    ):
        for number in numbers:
            (tmp_path / f"davinci{number}").touch()
        if numbers:
            (tmp_path / plugin.MANAGER).touch()

        def run_tool(*command: str) -> CompletedProcess[str]:
            assert command[:2] == ("npu-smi", "info")
            if isinstance(smi, Exception):
                raise smi
            answers = {(): "", ("-m",): smi, **dict.fromkeys(CHIP_1, "")} | (state or {})
            return CompletedProcess(command, 0, answers[command[2:]], "")

        find = importlib.util.find_spec
        found = {plugin.RUNTIME: extension and find("json")}
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: found[name] if name in found else find(name))
        monkeypatch.setattr(metadata, "version", lambda name: extension)
        monkeypatch.setattr(host, "run_tool", run_tool)
        monkeypatch.setattr(plugin, "torch_build", lambda: torch and TorchBuild(torch, None, None))

    return write


def test_npus_are_counted_with_name_files_and_extension(machine, tmp_path):
    machine(0, 1)
    found = plugin.probe()
    assert (found.ok, found.count, found.model) == (True, 2, "Ascend 910B3")
    assert found.devices == (f"{tmp_path}/davinci0", f"{tmp_path}/davinci1")
    assert found.reason == "2 device files, torch_npu 2.13.0.post2"


def test_both_chips_of_a_card_are_named(machine):
    machine(0, 1, smi=SMI_A3)
    assert plugin.probe().model == "Ascend910"


@pytest.mark.parametrize(
    "smi", [FileNotFoundError("npu-smi"), TimeoutExpired("npu-smi", 10), "dcmi model initialized failed\n"]
)
def test_npus_are_found_without_an_answer_of_the_tool(machine, smi):
    machine(0, smi=smi)
    found = plugin.probe()
    assert (found.ok, found.model) == (True, "Ascend")


def test_machine_without_a_device_file_has_no_npu(machine):
    machine()
    found = plugin.probe()
    assert (found.ok, found.present, found.count) == (False, False, 0)


def test_logic_ids_count_the_files_of_the_container(machine, monkeypatch, tmp_path):
    machine(4, 10, 9)
    monkeypatch.setenv(plugin.VISIBLE, "0,2")
    assert plugin.probe().devices == (f"{tmp_path}/davinci4", f"{tmp_path}/davinci10")


@pytest.mark.parametrize(
    ("wish", "count"),
    [
        ("1", 1),
        ("1,2,3", 3),
        ("1, 2,3", 1),  # CANN's manual: other characters end the list
        ("1,3,8", 2),  # and so does an id that does not exist
        ("1,8,2", 1),
        ("0,,1", 1),
        ("2,1", 0),  # ids must rise
        ("1,1", 0),
        ("", 0),
        ("-1", 0),
    ],
)
def test_visible_devices_are_read_as_cann_reads_them(machine, monkeypatch, wish, count):
    machine(0, 1, 2, 3)
    monkeypatch.setenv(plugin.VISIBLE, wish)
    found = plugin.probe()
    assert (found.ok, found.present) == (count > 0, count > 0)
    assert found.count == (count or 4)  # hidden ones are counted and not present


def test_file_that_cannot_be_opened_is_named_with_a_remedy(machine, tmp_path):
    machine(0)
    (tmp_path / plugin.MANAGER).unlink()
    found = plugin.probe()
    assert (found.ok, found.present) == (False, True)
    assert f"{tmp_path}/davinci_manager; join the group of these files" in found.reason


@pytest.mark.parametrize(
    ("torch", "extension", "reason"),
    [
        ("2.13.0+cpu", None, "torch_npu is not installed; install torch-npu 2.13.0, the release of torch"),
        (
            "2.14.0",
            "2.13.0",
            "torch_npu 2.13.0 needs the torch of its version, and torch is 2.14.0; install torch-npu 2.14.0",
        ),
    ],
)
def test_npu_whose_extension_is_missing_or_of_another_release_is_present(machine, torch, extension, reason):
    machine(0, torch=torch, extension=extension)
    found = plugin.probe()
    assert (found.ok, found.present) == (False, True)
    assert found.reason.startswith(reason)


def test_npu_without_the_environment_of_cann_is_present(machine, monkeypatch):
    machine(0)
    monkeypatch.delenv(plugin.HOME)
    found = plugin.probe()
    assert (found.ok, found.present) == (False, True)
    assert found.reason.endswith("ASCEND_HOME_PATH is not set; source its set_env.sh")


def test_health_is_that_of_the_visible_chip(machine, monkeypatch):
    machine(0, 1, state=dict(zip(CHIP_1, (HEALTH, ECC), strict=True)))
    monkeypatch.setenv(plugin.VISIBLE, "1")
    assert plugin.health(0) == Health({"state": "OK"}, (), {"double-bit errors of memory": 0})
    assert plugin.health(1) == Health()


def test_errors_of_memory_that_were_not_corrected_are_counted(machine):
    machine(0, 1, state=dict(zip(CHIP_1, (HEALTH.replace("OK", "Alarm"), ECC_910B), strict=True)))
    found = plugin.health(1)
    assert found.problems == ("npu-smi: Alarm, NA",)
    assert found.errors == {"double-bit errors of memory": 2}


def test_health_is_not_told_if_the_tool_lists_other_chips_or_fails(machine):
    machine(0)
    assert plugin.health(0) == Health()
    machine(0, smi=FileNotFoundError("npu-smi"))
    assert plugin.health(0) == Health()


def test_report_has_driver_and_files(machine, tmp_path):
    machine(0)
    (tmp_path / "version.info").write_text("Version=25.3.rc1\n")
    report = plugin.environment_report()
    assert report["driver"] == "Version=25.3.rc1"
    assert "davinci0" in report["device files"] and "davinci_manager" in report["device files"]
