"""A plugin as it should be: a backend above the CPU, a kernel, and an objection to some runs."""

from accelerators import AcceleratorSpec, KernelImpl, Probe, Problem, Support, hookimpl


@hookimpl
def rlhf_accelerators():
    return [
        AcceleratorSpec(
            name="good",
            api_version=2,
            factory="rlhf_good_backend:Good",
            probe=lambda: Probe(True, "found two", count=2, model="Good One"),
            priority=50,
        )
    ]


def supported(accelerator):
    fits = accelerator.name == "good"
    return Support(fits, "made for a Good One" if fits else "only on a Good One")


@hookimpl
def rlhf_kernels(accelerator):
    return [
        KernelImpl(
            operation="attention",
            name="good-attention",
            factory=lambda accelerator: "eager",
            supported=supported,
            priority=50,
        )
    ]


@hookimpl
def rlhf_check_run(run):
    if run["seed"] == 13:
        yield Problem("a Good One does not run with seed 13", "choose another seed")
