"""The exit code of commands that check or compare."""

BAD_RESULT = 3
"""The command has done its work, and the answer is bad: a check failed, things differ, something does not fit."""
