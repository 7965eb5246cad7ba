"""The models of each stage: their sources, their placement, and the weights that they share."""
