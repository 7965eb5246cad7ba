"""Evaluate finished models: by a reward model, on pairs, on text, and against one another."""
