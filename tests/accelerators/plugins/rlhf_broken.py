"""Backends with one fault each that shows in another process; their names state it."""

import os
import sys
import time

from accelerators import AcceleratorSpec, Probe, hookimpl

OPENED_BY = None
"""The process that first opened the device: as with real runtimes, its children cannot use it."""


def probe(**devices):
    return Probe(True, "found one", count=1, **devices)


def open_device():
    global OPENED_BY
    OPENED_BY = OPENED_BY or os.getpid()
    return probe()


def wait_if_checked():
    if sys.argv[-1] == "SlowProbe":  # the check's process names the backend last; others need not wait
        time.sleep(0.5)
    return probe()


PROBES = {
    "SlowProbe": wait_if_checked,
    "ProbeOpensDevice": open_device,
    "ProbeNumbersDevices": lambda: probe(devices=("chip 0",)),
}
OTHERS = ("OneDevice", "OtherDistBackend", "DeepSpeedName", "DeepSpeedClips", "CompilesLate", "Loud", "HalfAlone")


@hookimpl
def rlhf_accelerators():
    for name in (*PROBES, *OTHERS):
        factory = f"rlhf_broken_backends:{name}"
        fields = {"api_version": 2, "priority": -10, "probe": PROBES.get(name, probe)}
        yield AcceleratorSpec(name=name, factory=factory, **fields)
