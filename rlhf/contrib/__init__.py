"""Optional tools that nothing else imports."""
