"""Installs the simulator for real (built by setuptools, unpacked by pip) and runs Python with it, in strict mode."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import proof
import pytest
from forks import IMPORTS, Forks

from accelerators.backends.cpu import info as cpu_info

SOURCE = Path(__file__).parents[1]

Run = Callable[..., "subprocess.CompletedProcess[str]"]
Runs = Callable[..., proof.Run]

OPEN_ACCOUNTS = """
import sys
from gaudi_sim import accounting, build
from tests import forks
accounting.open_accounts(build.load())  # the report is left where the environment of this process says
forks.run_python(sys.argv[1:])
"""


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the distribution is installed."""
    base = tmp_path_factory.mktemp("gaudi-sim")
    copy, target = base / "source", base / "site"
    shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__", "tests", ".*", "build", "*.egg-info"))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index"]
    command = [*pip, "--no-deps", "--no-build-isolation", "--target", str(target), str(copy)]
    subprocess.run(command, check=True, env={**os.environ, "PIP_ROOT_USER_ACTION": "ignore"})
    return target


@pytest.fixture(scope="session")
def environment(site: Path) -> dict[str, str]:
    """A user's environment in which the simulator is installed and turned off."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("RLHF_", "PT_HPU_", "HABANA"))}
    clean["PT_HPU_LAZY_MODE"] = "1"  # `python(eager=True)` has the other mode
    # A working tree that PYTHONPATH names precedes the packages of this environment.
    paths = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    return clean | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="session")
def forks(environment: dict[str, str]) -> Iterator[Forks]:
    """Processes that start with torch, and with as much of transformers as does not ask for torch's device."""
    imports = (
        "torch._dynamo",
        "torch.distributed.fsdp",
        "torch.utils.tensorboard",
        "datasets",
        "transformers.generation",
    )
    forks = Forks(environment, imports)
    yield forks
    forks.close()


@pytest.fixture(scope="session")
def loaded_forks(environment: dict[str, str]) -> Iterator[dict[bool, Forks]]:
    """Processes that start with rlhf, DeepSpeed and all of transformers, on the simulated device (True) or the CPU."""
    simulated = {"RLHF_GAUDI_SIM": "1", "DS_ACCELERATOR": "hpu"}
    device = ("gaudi_sim.plugin", "habana_frameworks.torch.core", "accelerators.backends.hpu.backend")
    servers = {
        True: Forks(environment | simulated, (*device, *IMPORTS)),
        False: Forks(environment | {"DS_ACCELERATOR": "cpu"}),
    }
    yield servers
    for server in servers.values():
        server.close()


@pytest.fixture(scope="session")
def python(site: Path, environment: dict[str, str], forks: Forks, loaded_forks: dict[bool, Forks]) -> Run:
    """Run Python where the simulator is installed: python("-m", "rlhf", ..., simulated=False, strict=False).

    `fresh` starts a new interpreter, for tests of how the simulation is turned on; `loaded` starts with the libraries
    and the device, for runs of one process.
    """

    def run(
        *arguments: str,
        simulated: bool = True,
        strict: bool = True,
        eager: bool = False,
        fresh: bool = False,
        loaded: bool = False,
        env: dict[str, str] | None = None,
        seconds: float = 500,
    ) -> subprocess.CompletedProcess[str]:
        variables = {"RLHF_GAUDI_SIM": "1"} if simulated else {}
        variables |= {"RLHF_GAUDI_SIM_STRICT": "1"} if strict else {}
        variables |= {"PT_HPU_LAZY_MODE": "0"} if eager else {}
        variables |= env or {}
        folder = site.parent  # not where gaudi_sim lies as source
        if loaded and not (eager and simulated):  # the loaded device is lazy
            command = arguments
            if simulated:
                command = ("-c", OPEN_ACCOUNTS, *arguments)
                # As the installation of the simulation does, which came before the fork.
                variables["PATH"] = os.pathsep.join([str(site / "gaudi_sim" / "bin"), os.environ["PATH"]])
            return loaded_forks[simulated].python(*command, timeout=seconds, environment=variables, cwd=folder)
        if not fresh:
            return forks.python(*arguments, timeout=seconds, environment=variables, cwd=folder)
        return subprocess.run(
            [sys.executable, *arguments],
            env=environment | variables,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=seconds,
        )

    return run


@pytest.fixture(scope="session")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe of the proof."""
    return proof.write_recipe(tmp_path_factory.mktemp("recipe"))


@pytest.fixture(scope="session")
def finished(python: Run, recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """A run of all stages of the proof's recipe: finished("hpu", zero_stage=2, lora=4, ranks=2, eager=True); made once.

    It is strict, but for ZeRO 3, where DeepSpeed reads on the host in forward, in the first steps, and for offload.
    """
    known: dict[tuple[Any, ...], proof.Run] = {}

    def run(
        accelerator: str,
        *,
        zero_stage: int,
        precision: str = "bf16",
        lora: int = 0,
        ranks: int = 1,
        offload: str = "none",
        frozen: str = "auto",
        eager: bool = False,
    ) -> proof.Run:
        if (accelerator, precision) == ("cpu", "bf16") and not cpu_info.native_bf16():
            pytest.skip("the cpu backend has no bf16 on this processor")
        eager = accelerator == "hpu" and (eager or zero_stage == 3)  # lazy mode refuses ZeRO 3
        key = (accelerator, zero_stage, precision, lora, ranks, offload, frozen, eager)
        if key not in known:
            output = tmp_path_factory.mktemp("run") / "output"
            report = output.with_name("report.json")
            settings = {
                "engine.zero_stage": zero_stage,
                "engine.offload": offload,
                "engine.frozen": frozen,
                "engine.shapes": "static",  # hpu's own choice
                "precision": precision,
                "lora.rank": lora,
                "ppo.minibatch_size": max(2, ranks),
            }
            given = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
            how = ["--accelerator", accelerator, "--ranks", str(ranks), "--output", str(output)]
            env = {"RLHF_GAUDI_SIM_REPORT": str(report)}
            command = ["-m", "rlhf", "--config", str(recipe), *how, *given]
            strict = zero_stage < 3 and offload == "none"
            # One run as a user starts it: torch is imported after the backend has been chosen.
            fresh = key == ("hpu", 2, "bf16", 0, 1, "none", "auto", False)
            loaded = ranks == 1 and not fresh
            simulated = accelerator == "hpu"
            done = python(
                *command, simulated=simulated, strict=strict, eager=eager, fresh=fresh, loaded=loaded, env=env
            )
            assert done.returncode == 0, done.stderr[-2000:]
            assert "generation is slower" not in done.stderr  # decoding is recorded
            known[key] = proof.Run(output, json.loads(report.read_text()) if report.exists() else {})
        return known[key]

    return run
