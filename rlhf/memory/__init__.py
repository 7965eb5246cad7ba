"""Predictions of a run's memory, duration and price before it starts, and settings that make it fit."""
