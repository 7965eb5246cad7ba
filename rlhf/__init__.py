"""RLHF in three stages - supervised fine-tuning, a reward model, PPO - on any accelerator.

Runs start from the command line (`rlhf --help`) or from Python (`rlhf.launch.run`). Importing this package
loads neither torch nor DeepSpeed: the accelerator is chosen first, because some read their environment when
torch loads.
"""

__version__ = "0.1.0"
