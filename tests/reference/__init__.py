"""What each stage's step must compute, written a second time, plainly.

`sft`, `reward` and `ppo` are the three steps as their papers define them, in float64: a loop over rows, each row alone
and unpadded through a model of transformers; a loop over tokens; autograd for the gradients; AdamW, LoRA and the
learning rate by hand (`network`, `adamw`). No batch, no mask, no DeepSpeed, no peft, and no code of `rlhf.trainers`,
`rlhf.losses` or `rlhf.engine`: what the configuration's keys mean is taken from their descriptions.

The tests take one to three steps with the real stage (its loop, its engines, its batches, its records) and with the
reference, from the same weights and rows, and compare every recorded number and every weight. Only three things
are taken over from the real step, because they are drawn by chance: the tokens of a rollout, the order in which PPO
visits a rollout's rows, and the first A of a LoRA layer. A stage that learns the wrong thing, however smoothly, fails
here.

    sft, reward, ppo, adamw, network    the reference
    cases                               settings, models and rows; the comparison
    real, expected                      a run of the real stage, and the same run by the reference
    test_sft, test_reward, test_ppo     one process, fp32: ZeRO 0 and 1, LoRA, micro-batches, a filled-up batch, resume,
                                        gradient checkpointing
    test_two_ranks                      a process group of two, which runs `two_ranks`
"""
