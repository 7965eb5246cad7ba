"""A plugin whose backend lacks most methods."""

from accelerators import AcceleratorSpec, Probe, hookimpl


def __getattr__(name):  # the class is made when it is asked for: this module must not import torch
    if name != "Unfinished":
        raise AttributeError(name)
    from accelerators import Accelerator

    return type("Unfinished", (Accelerator,), {"name": "unfinished", "memory": lambda self: None})


@hookimpl
def rlhf_accelerators():
    probe = lambda: Probe(True, "")  # noqa: E731
    return [AcceleratorSpec(name="unfinished", api_version=2, factory="rlhf_unfinished:Unfinished", probe=probe)]
