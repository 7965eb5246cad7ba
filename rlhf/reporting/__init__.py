"""What a run tells: progress while it runs, records that stay, and a table at its end."""
