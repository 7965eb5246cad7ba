"""The way over from DeepSpeed-Chat and its fork for another accelerator.

`flags.yaml` and `variables.yaml` say what each flag, and each of the fork's variables, is here. A command line flows
in, a recipe with a comment on each flag flows out (`rlhf config --from-deepspeed-chat`); or the environment, and
arguments of `rlhf` (`python -m rlhf.contrib.deepspeed_chat.variables`). docs/deepspeed-chat.md shows the tables.
Needs no torch.
"""
