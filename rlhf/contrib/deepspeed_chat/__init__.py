"""Translate DeepSpeed-Chat's commands, and the variables of its fork for another accelerator, into recipes of rlhf.

`flags.yaml` and `variables.yaml` define each flag and each of the fork's variables. `rlhf config --from-deepspeed-chat`
turns a command line into a recipe with a comment on each flag; `python -m rlhf.contrib.deepspeed_chat.variables` turns
the environment into arguments of `rlhf`. docs/deepspeed-chat.md shows the tables. Needs no torch.
"""
