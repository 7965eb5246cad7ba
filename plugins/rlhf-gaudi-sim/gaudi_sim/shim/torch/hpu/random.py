"""The random numbers of the device: one generator, as there is one card in a process."""

import torch

from gaudi_sim.build import load

default_generators = (load().default_generator(),)


def manual_seed(seed: int) -> None:
    """Seed the device's generator."""
    default_generators[0].manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seed the generators of all cards of this process."""
    manual_seed(seed)


def initial_seed() -> int:
    """Return the seed that the generator was given."""
    seed: int = default_generators[0].initial_seed()
    return seed


def get_rng_state(device: object = "hpu") -> torch.Tensor:
    """Return the generator's state, on the CPU."""
    state: torch.Tensor = default_generators[0].get_state()
    return state


def set_rng_state(new_state: torch.Tensor, device: object = "hpu") -> None:
    """Put back what `get_rng_state` returned."""
    default_generators[0].set_state(new_state)
