"""Which build of torch runs on which NVIDIA GPUs, under which driver.

Only the standard library is used: `ci/environment.sh` asks before anything is installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Version = tuple[int, int]


@dataclass(frozen=True)
class Build:
    """A build of torch 2.12 to 2.15 for Linux (pytorch #190355, #196249).

    Attributes:
        cuda: version of CUDA. From 2.15 on, PyPI's build is for 13.2, with code for the same chips.
        tag: end of its version on PyTorch's own index; empty for PyPI's build.
        oldest, newest: compute capabilities that it has code for.
        driver: oldest driver that runs it. Within a major version of CUDA, older drivers run newer minor versions.
        last: newest torch that has this build; empty if every torch has it.
    """

    cuda: Version
    tag: str
    oldest: Version
    newest: Version
    driver: int
    last: str = ""

    def __str__(self) -> str:
        return "CUDA {}.{}".format(*self.cuda)


BUILDS = (
    Build((13, 0), "", (7, 5), (12, 1), 580),
    Build((12, 6), "cu126", (5, 0), (9, 0), 525, last="2.14"),
)
"""The preferred build first. There is none for CUDA 12.8 from torch 2.12 on (FBGEMM #5976)."""


@dataclass(frozen=True)
class Choice:
    """The build to install, why this one, and what to do; without a build, why there is none and what to do."""

    build: Build | None
    why: str
    remedy: str


def choose(gpus: Sequence[tuple[str, Version]], driver: str) -> Choice:
    """Return the first of `BUILDS` that has code for all GPUs (name, compute capability) and that the driver runs.

    If none has code for all GPUs, the first that has code for some of them.
    """
    release = int(driver.partition(".")[0])
    reasons = []
    for build in BUILDS:
        without = [f"{name} (sm_{cap[0]}{cap[1]})" for name, cap in gpus if not build.oldest <= cap <= build.newest]
        if release < build.driver:
            reasons.append(f"the one for {build} needs driver {build.driver} or later; this machine has {driver}")
        elif without:
            reasons.append(f"the one for {build} has no code for {', '.join(dict.fromkeys(without))}")
        else:
            return Choice(build, "; ".join([f"the build for {build}", *reasons]), _install(build))
    for build in BUILDS:
        some = [name for name, cap in gpus if build.oldest <= cap <= build.newest]
        if some and release >= build.driver:
            which = f"the build for {build}, which serves only {', '.join(dict.fromkeys(some))}"
            return Choice(build, "; ".join([which, *reasons]), _install(build))
    drivers = [build.driver for build in BUILDS if any(build.oldest <= cap <= build.newest for _, cap in gpus)]
    remedy = f"update the driver to {min(drivers)} or later" if drivers else "no build of torch has code for this GPU"
    return Choice(None, "; ".join([*reasons, remedy]), remedy)


def _install(build: Build) -> str:
    return f"install torch's build for {build}" + (f" ({build.last} or earlier)" if build.last else "")
