"""Records of a run: progress while it runs, permanent records, and a table at its end."""
