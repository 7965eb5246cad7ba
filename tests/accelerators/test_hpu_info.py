"""What is found out about Gaudi cards before torch is imported, against recorded answers of hl-smi and the driver."""

from __future__ import annotations

import importlib.util
import os
import tempfile
import time
from pathlib import Path

import pytest

from accelerators import AcceleratorError
from accelerators.backends.hpu import info as hpu_info
from tests.accelerators.habana import DRIVER, rows, write_hl_smi


@pytest.fixture(autouse=True)
def bare_machine(monkeypatch, tmp_path: Path) -> None:
    """No tool, no driver, no wish of the user's."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(hpu_info, "ACCEL", tmp_path / "accel")
    monkeypatch.setattr(hpu_info, "DRIVER", tmp_path / "habanalabs")
    monkeypatch.setattr(hpu_info, "DEV", tmp_path / "dev")
    for variable in ("HABANA_VISIBLE_DEVICES", "HABANA_VISIBLE_MODULES"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def hl_smi(tmp_path: Path):
    """Put an hl-smi on PATH that answers with this."""

    def put(output: str = "", **behaviour) -> None:
        write_hl_smi(tmp_path / "bin", output, **behaviour)

    return put


@pytest.fixture
def driver(tmp_path: Path):
    """The files of a driver with these devices: (what it calls the chip, module)."""

    def put(*devices: tuple[str, str]) -> None:
        (tmp_path / "habanalabs").mkdir()
        (tmp_path / "habanalabs" / "version").write_text(f"{DRIVER}\n")
        for number, (kind, module) in enumerate(devices):
            device = tmp_path / "accel" / f"accel{number}" / "device"
            device.mkdir(parents=True)
            (device / "device_type").write_text(f"{kind}\n")
            (device / "module_id").write_text(f"{module}\n")
            (tmp_path / "accel" / f"accel_controlD{number}").mkdir()

    return put


@pytest.fixture
def bridge(monkeypatch) -> None:
    """habana_frameworks is installed."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: "found" if name == hpu_info.RUNTIME else find(name))


# cards


@pytest.mark.parametrize(
    ("chip", "peaks"), [("Gaudi", {}), ("Gaudi2", {"bf16": 432e12}), ("Gaudi3", {"bf16": 1835e12})]
)
def test_hl_smi_tells_count_chip_and_driver(hl_smi, bridge, chip, peaks):
    hl_smi("a log line, of something, else\n" + rows(chip, 8))
    cards = hpu_info.cards()
    assert cards == hpu_info.Cards(8, chip, DRIVER, "hl-smi")
    assert cards.peak_flops == peaks
    probe = hpu_info.probe()
    assert (probe.ok, probe.count, probe.model) == (True, 8, chip)
    assert DRIVER in probe.reason
    assert hpu_info.Cards(1, chip, "rlhf-gaudi-sim 2 (a simulation on the CPU)", "hl-smi").peak_flops == {}


@pytest.mark.parametrize(
    ("board", "model"),
    [
        ("HL-205", "Gaudi"),
        ("HL-225", "Gaudi2"),
        ("HL-288", "Gaudi2"),
        ("HL-338", "Gaudi3"),
        ("HL-999", "HL-999"),
    ],
)
def test_boards_are_named_by_their_chip(hl_smi, board, model):
    hl_smi(f"0, {board}, {DRIVER}\n")
    assert hpu_info.cards().model == model


@pytest.mark.parametrize(
    ("kinds", "count", "model"),
    [(["GAUDI"], 1, "Gaudi"), (["GAUDI2B"] * 8, 8, "Gaudi2"), (["GAUDI3", "XDNA"], 1, "Gaudi3")],
)
def test_without_hl_smi_the_drivers_files_tell(driver, kinds, count, model):
    driver(*((kind, str(module)) for module, kind in enumerate(kinds)))
    cards = hpu_info.cards()
    assert (cards.count, cards.model, cards.driver) == (count, model, DRIVER)


@pytest.mark.parametrize(("visible", "count"), [(" 6 , 7 ", 2), ("0,9", 1), (None, 8)])
def test_only_visible_modules_count(hl_smi, driver, monkeypatch, visible, count):
    if visible is not None:
        monkeypatch.setenv("HABANA_VISIBLE_MODULES", visible)
    driver(*(("GAUDI2", str(module)) for module in range(8)))
    assert hpu_info.cards().count == count
    hl_smi(rows("Gaudi2", 8))
    assert hpu_info.cards().count == count


# refusals, the most fundamental first


def test_missing_driver_or_device_is_the_reason(driver):
    assert hpu_info.probe().reason.startswith("no Gaudi driver: no hl-smi on PATH, no ")
    assert not hpu_info.probe().ok
    driver()
    reason = hpu_info.probe().reason
    assert "the Gaudi driver is loaded, but" in reason and "has no card" in reason


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        (
            {"errors": "Failed to initialize hlml: driver not loaded\n", "code": 1},
            "hl-smi failed with exit code 1: Failed to initialize hlml: driver not loaded",
        ),
        ({"output": "No devices found\n"}, "hl-smi lists no card: No devices found"),
        ({}, "hl-smi lists no card: no output"),
        ({"output": "N/A, HL-225, 1.24.0\n"}, "hl-smi lists no card: N/A, HL-225, 1.24.0"),
    ],
)
def test_what_hl_smi_says_is_the_reason_when_it_fails(hl_smi, behaviour, reason):
    hl_smi(**behaviour)
    assert hpu_info.probe().reason == reason


def test_hl_smi_that_cannot_be_started_is_named(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "hl-smi").write_text("#!/nowhere/sh\n")
    (tmp_path / "bin" / "hl-smi").chmod(0o755)
    assert "hl-smi cannot be started (" in hpu_info.probe().reason


def test_container_without_cards_names_its_variable(hl_smi, monkeypatch):
    monkeypatch.setenv("HABANA_VISIBLE_DEVICES", "void")
    hl_smi("No devices found\n")
    assert "HABANA_VISIBLE_DEVICES=void chose the cards" in hpu_info.probe().reason


def test_a_hanging_hl_smi_is_given_up_and_named(hl_smi, monkeypatch):
    monkeypatch.setattr(hpu_info, "SECONDS", 0.3)
    hl_smi(seconds=30)
    started = time.monotonic()
    assert "hl-smi gave no answer in 0.3 s: the driver may hang" in hpu_info.probe().reason
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("visible", ["", "8"])
def test_hiding_every_card_is_a_reason(hl_smi, monkeypatch, visible):
    monkeypatch.setenv("HABANA_VISIBLE_MODULES", visible)
    hl_smi(rows("Gaudi2", 2, first_module=4))
    assert f"HABANA_VISIBLE_MODULES={visible} hides every card; their modules are 5, 4" == hpu_info.probe().reason
    assert (hpu_info.probe().count, hpu_info.probe().present) == (2, False)
    with pytest.raises(AcceleratorError, match="hides every card"):
        hpu_info.cards()


def test_cards_count_if_this_process_may_open_their_files(hl_smi, driver, bridge, tmp_path, monkeypatch):
    hl_smi(rows("Gaudi2", 4))
    driver(*(("GAUDI2", str(module)) for module in (3, 2, 1, 0)))
    files = [tmp_path / "dev" / "accel" / f"accel{number}" for number in range(4)]  # of modules 3, 2, 1, 0
    assert hpu_info.cards().count == 4  # an older driver has no such files
    files[0].parent.mkdir(parents=True)
    files[0].touch()
    files[2].touch()
    assert hpu_info.cards().modules == ("3", "1") and hpu_info.probe().count == 2
    refused, access = [files[0]], os.access  # root may open anything
    monkeypatch.setattr(os, "access", lambda path, mode: path not in refused and access(path, mode))
    assert hpu_info.cards().modules == ("1",)
    refused.append(files[2])
    assert hpu_info.probe().reason.startswith(f"this user may not open any of the 4 cards (in {tmp_path}/dev/accel)")
    assert hpu_info.probe().present and not hpu_info.probe().ok


def test_all_modules_is_a_wish_that_the_bridge_cannot_read(hl_smi, monkeypatch):
    monkeypatch.setenv("HABANA_VISIBLE_MODULES", "ALL")
    hl_smi(rows("Gaudi2", 8))
    assert hpu_info.probe().reason == "HABANA_VISIBLE_MODULES=ALL: Gaudi's bridge accepts module numbers only; unset it"


@pytest.mark.parametrize(("lazy", "int64"), [(None, False), ("0", False), ("1", True)])
def test_variables_of_lazy_mode_are_set_in_lazy_mode_alone(monkeypatch, tmp_path, lazy, int64):
    monkeypatch.setenv("HABANA_LOGS", str(tmp_path))
    monkeypatch.delenv("PT_HPU_LAZY_MODE", raising=False)
    if lazy is not None:
        monkeypatch.setenv("PT_HPU_LAZY_MODE", lazy)
    variables = hpu_info.environment({})
    assert ("PT_ENABLE_INT64_SUPPORT" in variables) == int64 == ("PT_HPU_ENABLE_LAZY_COLLECTIVES" in variables)
    assert (variables.get("PT_HPU_WEIGHT_SHARING") == "0") == int64
    assert "HABANA_LOGS" not in variables


def test_compiled_graphs_are_shared_by_ranks_and_runs_of_a_release(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(hpu_info, "release", lambda: "1.24.1.500")
    setting = hpu_info.environment({})["PT_HPU_RECIPE_CACHE_CONFIG"]
    folder, delete, megabytes = setting.split(",")
    assert folder == f"{tmp_path}/rlhf-gaudi-recipes-{os.getuid()}-1.24.1.500"
    assert (delete, megabytes) == ("false", "16384")
    assert Path(folder).stat().st_mode & 0o777 == 0o700
    assert hpu_info.environment({})["PT_HPU_RECIPE_CACHE_CONFIG"] == setting
    monkeypatch.setattr(hpu_info, "release", lambda: "1.23.0.695")
    assert hpu_info.environment({})["PT_HPU_RECIPE_CACHE_CONFIG"] != setting
    monkeypatch.setenv("PT_HPU_RECIPE_CACHE_CONFIG", "/mine,false,1024")
    assert "PT_HPU_RECIPE_CACHE_CONFIG" not in hpu_info.environment({})


@pytest.mark.parametrize("taken", ["link", "writable"])
def test_compiled_graphs_of_others_are_not_read(monkeypatch, tmp_path, taken):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(hpu_info, "release", lambda: "1.24.1.500")
    folder = tmp_path / f"rlhf-gaudi-recipes-{os.getuid()}-1.24.1.500"
    if taken == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        folder.mkdir()
        folder.chmod(0o777)
    chosen = Path(hpu_info.environment({})["PT_HPU_RECIPE_CACHE_CONFIG"].split(",")[0])
    assert chosen.name.startswith(f"{folder.name}-")
    assert chosen.stat().st_mode & 0o777 == 0o700


def test_logs_go_where_they_can_be_written(monkeypatch, tmp_path):
    monkeypatch.setenv("HABANA_LOGS", str(tmp_path / "missing" / "logs"))
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != str(tmp_path))
    assert hpu_info.environment({})["HABANA_LOGS"].startswith(tempfile.gettempdir())
    monkeypatch.undo()
    (tmp_path / "file").touch()
    monkeypatch.setenv("HABANA_LOGS", str(tmp_path / "file" / "logs"))
    assert hpu_info.environment({})["HABANA_LOGS"].startswith(tempfile.gettempdir())
    assert "HABANA_LOGS" not in os.environ, "an export keeps what is set"


def test_logs_below_a_folder_that_may_not_be_entered_go_elsewhere(monkeypatch, tmp_path):
    def denied(self, **options):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setenv("HABANA_LOGS", str(tmp_path / "closed" / "logs"))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setattr(Path, "stat", denied)  # as below a folder of another user, with any user
    assert hpu_info.environment({})["HABANA_LOGS"].startswith(tempfile.gettempdir())


@pytest.mark.parametrize(("exists", "wish"), [(True, None), (True, ""), (True, "/other.so"), (False, None)])
def test_kernels_are_named_if_the_container_has_lost_their_variable(monkeypatch, tmp_path, exists, wish):
    library = tmp_path / "libtpc_kernels.so"
    if exists:
        library.touch()
    monkeypatch.setattr(hpu_info, "DEFAULT_KERNELS", library)
    monkeypatch.delenv("GC_KERNEL_PATH", raising=False)
    if wish is not None:
        monkeypatch.setenv("GC_KERNEL_PATH", wish)
    expected = str(library) if exists and not wish else None
    assert hpu_info.environment({}).get("GC_KERNEL_PATH") == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("synStatus=26 [Generic failure] Device acquire failed.", "hl-smi shows who uses it"),
        ("g_ibv.init( failed: synStatus=26 [Generic failure] Device acquire failed.", "--device=/dev/infiniband"),
    ],
)
def test_remedy_for_a_card_that_cannot_be_opened_follows_from_the_error(text, words):
    assert words in hpu_info.describe_opening_remedy(RuntimeError(text))


@pytest.mark.parametrize(
    ("release", "words"),
    [
        ("1.22.0.740", "; this container is of release 1.22, and the driver of 1.24: use the container of 1.24"),
        ("1.24.1.3", ""),
        ("", ""),
    ],
)
def test_container_of_another_release_than_the_driver_is_named(monkeypatch, release, words):
    monkeypatch.setattr(hpu_info, "release", lambda: release)
    assert hpu_info.describe_mismatch(DRIVER) == words


def test_cards_without_the_bridge_are_refused_but_counted(hl_smi):
    hl_smi(rows("Gaudi2", 8))
    probe = hpu_info.probe()
    assert not probe.ok
    assert probe.reason.startswith("habana_frameworks (Gaudi's PyTorch bridge) is not installed here; use Intel's")
    assert "of release 1.23 or later" in probe.reason
    assert (probe.count, probe.model, probe.present) == (8, "Gaudi2", True)


@pytest.mark.parametrize(("nodes", "present"), [((), False), (("accel/accel1",), True), (("accel/accel0",), False)])
def test_without_hl_smi_a_card_is_there_where_its_file_is(driver, tmp_path, nodes, present):
    driver(("XDNA", "0"), ("GAUDI2", "1"))  # of another vendor, the first one
    for node in nodes:
        (tmp_path / "dev" / node).parent.mkdir(parents=True)
        (tmp_path / "dev" / node).touch()
    assert (hpu_info.probe().ok, hpu_info.probe().present, hpu_info.probe().count) == (False, present, 1)


@pytest.mark.parametrize(("wish", "present"), [(None, True), ("0", True), ("", False)])
def test_card_is_present_although_its_driver_does_not_answer(hl_smi, tmp_path, monkeypatch, wish, present):
    hl_smi(errors="driver not loaded\n", code=1)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "hl0").touch()
    (tmp_path / "dev" / "hl_controlD0").touch()
    if wish is not None:
        monkeypatch.setenv("HABANA_VISIBLE_MODULES", wish)
    probe = hpu_info.probe()
    assert (probe.ok, probe.present, probe.count) == (False, present, 1)
    assert probe.reason == f"hl-smi failed with exit code 1: driver not loaded (cards are present: {tmp_path}/dev/hl0)"


def test_visible_cards_are_named_by_address_or_file(driver, bridge, tmp_path, monkeypatch):
    driver(("GAUDI2", "3"), ("GAUDI2", "4"), ("XDNA", "3"), ("GAUDI2", "5"))
    for number in (0, 1, 2):
        device = tmp_path / "accel" / f"accel{number}" / "device"
        address = tmp_path / "pci" / f"0000:1{number}:00.0"
        address.parent.mkdir(exist_ok=True)
        device.rename(address)
        device.symlink_to(address)
    monkeypatch.setenv("HABANA_VISIBLE_MODULES", "3,5")
    assert hpu_info.probe().devices == ("pci:0000:10:00.0", "/dev/accel/accel3")


# discovery, in a process of its own: nothing but PATH and an importable package


@pytest.fixture
def gaudi_machine(monkeypatch, tmp_path: Path) -> dict[str, str]:
    """The environment of a machine with cards and the bridge; importing the bridge would end the process."""
    monkeypatch.undo()
    write_hl_smi(tmp_path / "tools", rows("Gaudi2", 8))
    package = tmp_path / "packages" / "habana_frameworks"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('a probe imported the bridge')")
    path = os.pathsep.join([str(tmp_path / "tools"), os.environ["PATH"]])
    return {"PATH": path, "PYTHONPATH": str(tmp_path / "packages"), "RLHF_PLUGINS": "none"}


def test_auto_takes_gaudi_without_torch_or_bridge(run_python, gaudi_machine):
    code = (
        "import os, sys, accelerators\n"
        "selection = accelerators.select('auto')\n"
        "names = ['PT_ENABLE_INT64_SUPPORT', 'PT_HPU_ENABLE_LAZY_COLLECTIVES', 'PT_HPU_LAZY_MODE']\n"
        "for environ in ({}, {'PT_ENABLE_INT64_SUPPORT': '0', 'PT_HPU_LAZY_MODE': '1'}):\n"
        "    os.environ.update(environ)\n"
        "    selection.export(environ)\n"
        "    print(selection.name, *(environ.get(name) for name in names))\n"
        "print(sorted({'torch', 'habana_frameworks'} & set(sys.modules)))"
    )
    done = run_python("-c", code, env=gaudi_machine)
    assert done.stdout.splitlines() == ["hpu None None None", "hpu 0 true 1", "[]"], done.stderr
