"""Run folders: stages, resuming, backups, disk space."""
