"""The simulation in this process: `core` is Gaudi's bridge as users import it, `device` the module beneath it."""

import importlib

import gaudi_sim
from gaudi_sim.build import load

gaudi_sim.install()
core = importlib.import_module("habana_frameworks.torch.core")
device = load()

__all__ = ["core", "device"]
