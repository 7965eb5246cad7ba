"""What is importable as `habana_frameworks` once the simulation is on: the names that rlhf and DeepSpeed use of it."""
