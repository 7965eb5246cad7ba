"""Optional tools; only the command line imports them."""
