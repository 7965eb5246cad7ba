"""The mode that the bridge runs in."""

from gaudi_sim.accounting import is_lazy

__all__ = ["is_lazy"]
