"""Reinforcement learning of a policy: a rollout, what the models make of it, advantages, and the updates."""
