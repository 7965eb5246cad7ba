"""One recipe on two backends in lockstep: the first tensor that differs, and the operator that made it."""
