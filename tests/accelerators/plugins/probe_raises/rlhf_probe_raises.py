"""A plugin that finds something it did not expect."""

from accelerators import AcceleratorSpec, hookimpl


def probe():
    raise OSError("the driver does not answer")


@hookimpl
def rlhf_accelerators():
    return [AcceleratorSpec(name="shaky", api_version=2, factory="nowhere:Nothing", probe=probe)]
