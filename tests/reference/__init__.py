"""What each stage's step must compute, written a second time, plainly.

`sft`, `reward` and `ppo` are the three steps as their papers define them, in float64: a loop over rows, each row alone
and unpadded through a model of transformers; a loop over tokens; autograd for the gradients; AdamW, LoRA and the
learning rate by hand (`network`, `adamw`). No batch, no mask, no DeepSpeed, no peft, and no code of `rlhf.stages`,
`rlhf.objectives` or `rlhf.engine`: what the configuration's keys mean is taken from their descriptions.

The tests take one to three steps with the real stage (its loop, its engines, its batches, its records) and with the
reference, from the same weights and rows, and compare every recorded number and every weight. Only two things
are taken over from the real step, because they are drawn by chance: the tokens of a rollout, and the order in which
PPO visits its rows. A stage that learns the wrong thing, however smoothly, fails here.

    test_sft.py, test_reward.py, test_ppo.py    one process, fp32: ZeRO 0 and 1, LoRA, micro-batches, filled-up batches
    test_two_ranks.py                           the same in a process group of two (`two_ranks.py` is what they run)
    cases.py                                    models, rows, and the comparison
"""
