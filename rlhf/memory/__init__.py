"""The memory, hours and money of a run, predicted before it starts, and settings that make it fit."""
