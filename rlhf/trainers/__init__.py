"""The stages, each one algorithm, and the loop that they share."""
