"""Start one process per device, watch them, and report how they ended."""
