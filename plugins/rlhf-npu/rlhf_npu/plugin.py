"""The entry point: finds Ascend NPUs by the driver's files and tool, without torch and without opening a device.

Sources, each named where it is used:
[files] hiascend.com, MindCluster, "Default Content Mounted by Ascend Docker Runtime"
[smi] hiascend.com, npu-smi command reference, `npu-smi info -m`: the chips; other rows (Mcu) have no logic id;
    `-t health` and `-t ecc`: the state of a chip, and errors of its memory since the last start of the machine
[visible] hiascend.com, CANN, environment variable ASCEND_RT_VISIBLE_DEVICES; torch_npu/npu/__init__.py,
    `_parse_visible_devices` and `_device_count_ascend_hal`
[torch] the metadata of torch_npu: each release requires the torch of its version
[cann] deepspeed/ops/op_builder/npu/builder.py: the import of DeepSpeed reads ASCEND_HOME_PATH
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterable
from importlib import metadata
from itertools import takewhile
from pathlib import Path
from typing import Any

from accelerators import AcceleratorSpec, Health, Probe, describe_files, hookimpl, read_command, read_text, torch_build

DEV, DRIVER = Path("/dev"), Path("/usr/local/Ascend/driver/version.info")
MANAGER = "davinci_manager"
VISIBLE, HOME = "ASCEND_RT_VISIBLE_DEVICES", "ASCEND_HOME_PATH"
RUNTIME = "torch_npu"


def chips() -> list[Path]:
    """Return the files of the NPUs that this machine or container has, by logic id [files]."""
    numbered = {int(path.name[len("davinci") :]): path for path in DEV.glob("davinci[0-9]*") if path.name[7:].isdigit()}
    return [numbered[number] for number in sorted(numbered)]


def shown(present: list[Path]) -> list[Path]:
    """Return the NPUs that the process sees [visible]: ids up to the first one that does not exist, in rising order."""
    if (wish := os.environ.get(VISIBLE)) is None:
        return present
    ids = [int(part) for part in takewhile(bool, re.sub(r"[^\d,].*", "", wish).split(","))]
    ids = list(takewhile(lambda number: number < len(present), ids))
    return [present[number] for number in ids] if ids == sorted(set(ids)) else []


def ask(*question: str) -> str:
    """Return the answer of npu-smi [smi], or in parentheses why it has none."""
    return read_command("npu-smi", "info", *question)


def rows() -> list[list[str]]:
    """Return card, chip, logic id and name of each chip, according to npu-smi."""
    fields = [re.split(r"\s{2,}", line.strip()) for line in ask("-m").splitlines()]
    return [row for row in fields if len(row) > 3 and all(field.isdigit() for field in row[:-1])]


def model() -> str:
    """Return the names of the chips; "Ascend" if npu-smi does not tell."""
    return " / ".join(dict.fromkeys(row[-1] for row in rows())) or "Ascend"


def health(index: int) -> Health:
    """Return the state of a device of torch_npu, and the errors of its memory that were not corrected."""
    present, table = chips(), rows()
    devices = shown(present)
    if index >= len(devices) or len(table) != len(present):
        return Health()
    card, chip = table[present.index(devices[index])][:2]
    place = ("-i", card, "-c", chip)
    lines = [*ask("-t", "health", *place).splitlines(), *ask("-t", "ecc", *place).splitlines()]
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(" : ") for line in lines)}
    state = facts.get("Health Status", "UNKNOWN")
    problem = (f"npu-smi: {state}, {facts.get('Error Information')}",) if state not in ("OK", "UNKNOWN") else ()
    counts = [int(facts[name]) for name in facts if re.search(r"(?i)double.bit error count", name)]
    return Health({"state": state}, problem, {"double-bit errors of memory": sum(counts)})


def probe() -> Probe:
    """Report whether torch_npu can use an NPU here; if not, the most fundamental reason."""
    present = chips()
    if not present:
        return Probe(False, f"no {DEV}/davinci0: no Ascend driver, or a container that was started without the device")
    devices = shown(present)
    if not devices:
        return Probe(False, f"{VISIBLE}={os.environ[VISIBLE]} hides all {len(present)} NPUs", count=len(present))
    facts: dict[str, Any] = {"count": len(devices), "model": model(), "present": True}
    files = [*devices, DEV / MANAGER]
    if closed := [str(file) for file in files if not os.access(file, os.R_OK | os.W_OK)]:
        remedy = "join the group of these files (HwHiAiUser), or give them to the container"
        return Probe(False, f"this user may not open {', '.join(closed)}; {remedy}", **facts)
    build = torch_build()
    version = build.version.partition("+")[0] if build else ""
    if importlib.util.find_spec(RUNTIME) is None:
        return Probe(False, f"{RUNTIME} is not installed; install torch-npu {version}, the release of torch", **facts)
    extension = metadata.version(RUNTIME)
    if version.split(".")[:2] != extension.split(".")[:2]:  # [torch]
        reason = f"{RUNTIME} {extension} needs the torch of its version, and torch is {version or 'not installed'}"
        return Probe(False, f"{reason}; install torch-npu {version}", **facts)
    if HOME not in os.environ:  # [cann]
        return Probe(False, f"CANN's environment is not loaded, {HOME} is not set; source its set_env.sh", **facts)
    reason = f"{len(present)} device files, {RUNTIME} {extension}"
    return Probe(True, reason, devices=tuple(map(str, devices)), **facts)


def environment_report() -> dict[str, str]:
    """Return facts about NPUs and drivers (`Accelerator.environment_report`)."""
    return {
        "npu-smi": ask(),
        "driver": read_text(DRIVER).strip() or f"no {DRIVER}",
        "CANN": os.environ.get(HOME, "its set_env.sh has not been sourced"),
        "device files": describe_files([*chips(), *DEV.glob("davinci_*"), DEV / "devmm_svm", DEV / "hisi_hdc"]),
    }


@hookimpl
def rlhf_accelerators() -> Iterable[AcceleratorSpec]:
    """Offer the backend."""
    return [AcceleratorSpec(name="npu", api_version=3, factory="rlhf_npu.backend:NPU", probe=probe, priority=105)]
