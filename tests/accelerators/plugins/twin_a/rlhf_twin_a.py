"""One of two plugins that offer the same name."""

from accelerators import AcceleratorSpec, Probe, hookimpl


@hookimpl
def rlhf_accelerators():
    return [AcceleratorSpec(name="twin", api_version=2, factory="nowhere:Nothing", probe=lambda: Probe(True, ""))]
