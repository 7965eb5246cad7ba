"""Sweeps: one recipe at every point of a grid of settings, each a run of its own; a table and plots of them all."""
