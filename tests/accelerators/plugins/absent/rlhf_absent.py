"""A plugin whose device is not in this machine."""

from accelerators import AcceleratorSpec, Probe, hookimpl


@hookimpl
def rlhf_accelerators():
    probe = lambda: Probe(False, "no file /dev/absent0")  # noqa: E731
    return [AcceleratorSpec(name="absent", api_version=2, factory="nowhere:Nothing", probe=probe, priority=90)]
