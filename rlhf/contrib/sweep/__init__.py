"""Sweeps: one recipe at every point of a grid of settings, one run each, with a table and a page about them all."""
