"""Questions to the bridge."""
