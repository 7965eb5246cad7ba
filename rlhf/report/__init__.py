"""A run's report: one HTML file that needs no network and no server, made from the run's folder alone."""
