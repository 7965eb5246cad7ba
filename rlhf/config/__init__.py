"""The one schema of settings, for YAML files, `--set` and Python."""
