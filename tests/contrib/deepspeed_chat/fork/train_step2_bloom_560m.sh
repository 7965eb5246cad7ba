#!/bin/bash
# A script in the manner of the fork's example_scripts/bloom.
set -ex
gbs=${HL_GBS:-64}
mbs=${HL_MBS:-8}
n_devices_per_node=${HL_DEVICES_PER_NODE:-8}
dataset_path=${HL_DATASET_PATH}
checkpoint_path=${HL_BASE_OUT_PATH:-/root/logs}/${HL_TAG:-default_tag}/step2
CMD="step2_reward_model_finetuning/main.py \
      --model_name_or_path ${HL_CRITIC_MODEL:-bigscience/bloom-560m} --data_path ${dataset_path} \
      --dtype bf16 --learning_rate ${HL_LEARNING_RATE:-2e-5} --dropout 0.0 --weight_decay 0.0 \
      --per_device_train_batch_size ${mbs} \
      --gradient_accumulation_steps $(($gbs/$n_devices_per_node/$mbs)) \
      --num_train_epochs ${HL_EPOCHS:-2} --zero_stage ${HL_CRITIC_ZERO_STAGE:-1} --seed ${HL_SEED:-10} \
      --num_padding_at_beginning 0 --deepspeed --output_dir ${checkpoint_path} --no_fused_kernels"
deepspeed --num_gpus ${n_devices_per_node} $CMD
