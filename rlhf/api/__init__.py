"""The Python interface: a session, PPO driven step by step, texts in and out."""
