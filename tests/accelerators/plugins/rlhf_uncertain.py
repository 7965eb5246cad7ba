"""The CPU with one fault, which the variable FAULT names, for `rlhf accelerators certify`."""

from accelerators import AcceleratorSpec, Probe, hookimpl


@hookimpl
def rlhf_accelerators():
    probe = Probe(True, "found one", count=1, model="Uncertain")
    factory = "rlhf_uncertain_backend:Uncertain"
    return [AcceleratorSpec(name="uncertain", api_version=2, factory=factory, probe=lambda: probe, priority=-10)]
