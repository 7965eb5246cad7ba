"""Rollouts on other devices: servers that draw for a trainer, and the receipts that prove with which weights."""
