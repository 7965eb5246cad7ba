"""What finished models are worth: judged by a reward model, on pairs, on text, and beside one another."""
