"""Evaluate finished models: on pairs, on text, and in comparison with each other."""
