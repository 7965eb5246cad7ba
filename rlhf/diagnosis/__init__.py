"""A run's records, read from its folder alone, and what they say about it: invariants, signals and a verdict."""
