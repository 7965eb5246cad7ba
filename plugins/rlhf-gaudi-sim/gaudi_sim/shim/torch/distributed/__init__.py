"""Several processes, each with a card."""
