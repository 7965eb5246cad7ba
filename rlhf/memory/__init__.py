"""What a run takes, known before it starts: bytes by role and phase, whether they fit, hours and money."""
