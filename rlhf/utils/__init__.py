"""Helpers that are independent of training."""
