"""Reinforcement learning of a policy: rollouts, their scores, advantages, and updates."""
