"""The Python interface: sessions, and PPO taken step by step with texts as input and output."""
