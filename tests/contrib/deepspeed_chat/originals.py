"""The flags of the original programs, with their defaults: read off their argument parsers, the source of this table.

DeepSpeedExamples/applications/DeepSpeed-Chat at 45b4b715, earlier versions where it says so, and the fork's. A switch
has the default None, a flag without one too; `required` is no default.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

FORK = Path(__file__).with_name("fork")
"""Scripts in the manner of the fork's."""

SCRIPTS = {
    path.stem: path.read_text(encoding="utf-8").replace("FORK", str(FORK))
    for path in Path(__file__).parent.glob("scripts/*.sh")
}
"""Command lines of DeepSpeed-Chat's own training scripts, and of the fork's, as their users start them."""

SHARED: dict[str, Any] = {
    "--data_path": ["Dahoas/rm-static"],
    "--data_split": "2,4,4",
    "--num_train_epochs": 1,
    "--gradient_accumulation_steps": 1,
    "--lr_scheduler_type": "cosine",
    "--output_dir": None,
    "--local_rank": -1,
    "--offload": None,
    "--dtype": "fp16",
    "--only_optimize_lora": None,
    "--compute_fp32_loss": None,
    "--enable_tensorboard": None,
    "--add_eot_token": None,
    "--deepspeed": None,
    "--deepspeed_config": None,
    "--deepscale": None,
    "--deepscale_config": None,
}
SUPERVISED: dict[str, Any] = SHARED | {
    "--data_output_path": "/tmp/data_files/",
    "--model_name_or_path": None,
    "--per_device_train_batch_size": 16,
    "--per_device_eval_batch_size": 16,
    "--max_seq_len": 512,
    "--weight_decay": 0.0,
    "--num_warmup_steps": 0,
    "--seed": 1234,
    "--gradient_checkpointing": None,
    "--dropout": None,
    "--zero_stage": 0,
    "--lora_dim": 0,
    "--lora_module_name": "decoder.layers.",
    "--lora_learning_rate": 5e-4,
}
FLAGS: dict[str, dict[str, Any]] = {
    "sft": SUPERVISED
    | {
        "--sft_only_data_path": [],
        "--learning_rate": 1e-3,
        "--tensorboard_path": "step1_tensorboard",
        "--eot_token": "<|endoftext|>",
        "--print_loss": None,
        "--disable_dropout": None,  # earlier
        "--no_fused_kernels": None,  # the fork's
        "--zero_hpz_enabled": None,  # the fork's
    },
    "reward": SUPERVISED
    | {
        "--learning_rate": 5e-5,
        "--num_padding_at_beginning": 1,
        "--eval_interval": 0,
        "--eval_iters": 100,
        "--tensorboard_path": "step2_tensorboard",
        "--disable_dropout": None,  # earlier
        "--print_loss": None,  # the fork's
        "--no_fused_kernels": None,  # the fork's
        "--optimized_reward_loss_calc": None,  # the fork's
        "--zero_hpz_enabled": None,  # the fork's
    },
    "dpo": SUPERVISED
    | {
        "--learning_rate": 1e-3,
        "--beta": 0.1,
        "--label_smoothing": 0.0,
        "--offload_reference_model": None,
        "--tensorboard_path": "step2_tensorboard",
        "--print_loss": None,
    },
    "ppo": SHARED
    | {
        "--data_output_path": "/tmp/data_files",
        "--unsupervised_dataset_name": None,
        "--unsupervised_dataset_config_name": None,
        "--unsup_coef": 27.8,
        "--actor_model_name_or_path": None,
        "--critic_model_name_or_path": None,
        "--num_padding_at_beginning": 1,
        "--per_device_generation_batch_size": 16,
        "--per_device_training_batch_size": 16,
        "--generation_batches": 1,
        "--ppo_epochs": 1,
        "--max_prompt_seq_len": 256,
        "--max_answer_seq_len": 256,
        "--actor_learning_rate": 9.65e-6,
        "--critic_learning_rate": 5e-6,
        "--actor_weight_decay": 0.0,
        "--critic_weight_decay": 0.0,
        "--num_warmup_steps": 100,
        "--seed": None,
        "--preprocessing_num_workers": None,
        "--enable_hybrid_engine": None,
        "--unpin_actor_parameters": None,
        "--release_inference_cache": None,
        "--inference_tp_size": 1,
        "--tp_gather_partition_size": 8,
        "--offload_reference_model": None,
        "--offload_reward_model": None,
        "--actor_zero_stage": 0,
        "--critic_zero_stage": 0,
        "--actor_gradient_checkpointing": None,
        "--critic_gradient_checkpointing": None,
        "--actor_dropout": None,
        "--critic_dropout": None,
        "--disable_actor_dropout": None,  # earlier
        "--disable_critic_dropout": None,  # earlier
        "--actor_lora_dim": 0,
        "--actor_lora_module_name": "decoder.layers.",
        "--critic_lora_dim": 0,
        "--critic_lora_module_name": "decoder.layers.",
        "--actor_lora_learning_rate": 5e-4,
        "--critic_lora_learning_rate": 5e-4,
        "--enable_ema": None,
        "--enable_mixed_precision_lora": None,
        "--tensorboard_path": "step3_tensorboard",
        "--align_overflow": None,
        "--print_answers": None,
        "--print_answers_interval": 1,
        "--enable_test_mode": None,
        "--test_stop_step": 0,
        "--no_fused_kernels": None,  # the fork's
        "--enable_hpu_graphs": None,  # the fork's
        "--zero_hpz_enabled_actor": None,  # the fork's
        "--zero_hpz_enabled_critic": None,  # the fork's
    },
    "e2e": {
        "--step": "1 2 3",
        "--actor-model": "1.3b",
        "--reward-model": "350m",
        "--actor-zero-stage": "",
        "--reward-zero-stage": "",
        "--output-dir": "./output",
        "--deployment-type": "single_gpu",
    },
    "chat": {"--path": None, "--max_new_tokens": 128},
    "rw_eval": {"--model_name_or_path": None, "--num_padding_at_beginning": 1, "--add_eot_token": None},
    "prompt_eval": {
        "--model_name_or_path_baseline": None,
        "--model_name_or_path_finetune": None,
        "--num_beams": 1,
        "--num_beam_groups": 1,
        "--top_k": 4,
        "--penalty_alpha": 0.6,
        "--num_return_sequences": 1,
        "--max_new_tokens": 100,
        "--language": "English",
        "--add_eot_token": None,
    },
}
EARLIER: dict[str, dict[str, str]] = {
    "ppo": {
        "--per_device_train_batch_size": "--per_device_generation_batch_size",
        "--per_device_mini_train_batch_size": "--per_device_training_batch_size",
        "--generation_batch_numbers": "--generation_batches",
        "--enable_mixed_precision_zeropp": "--enable_mixed_precision_lora",
    },
    "e2e": {"--num-gpus": "--deployment-type"},
}
"""Names of earlier versions -> today's."""
