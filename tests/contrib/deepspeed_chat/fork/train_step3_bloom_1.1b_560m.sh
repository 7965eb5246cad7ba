#!/bin/bash
# A script in the manner of the fork's example_scripts/bloom.
set -ex
act_model_path=${HL_ACTOR_MODEL_PATH}
cri_model_path=${HL_CRITIC_MODEL_PATH}
gbs=${HL_GBS:-64}
mbs=${HL_MBS:-2}
n_devices_per_node=${HL_DEVICES_PER_NODE:-8}
ckp_act_args=""
if [ "${HL_ACTOR_CP_ACT:-0}" -eq "1" ]; then
  ckp_act_args="--actor_gradient_checkpointing "
fi
checkpoint_path=${HL_BASE_OUT_PATH:-/root/logs}/${HL_TAG:-default_tag}/step3
deepspeed --num_gpus ${n_devices_per_node} step3_rlhf_finetuning/main.py \
      --actor_model_name_or_path ${act_model_path} --critic_model_name_or_path ${cri_model_path} \
      --data_path ${HL_DATASET_PATH} --dtype bf16 --num_train_epochs 1 \
      --actor_zero_stage ${HL_ACTOR_ZERO_STAGE:-1} --critic_zero_stage ${HL_CRITIC_ZERO_STAGE:-1} \
      --per_device_generation_batch_size ${mbs} --per_device_training_batch_size ${mbs} \
      --gradient_accumulation_steps $(($gbs/$n_devices_per_node/$mbs)) \
      --actor_learning_rate ${HL_ACTOR_LR:-1e-5} --critic_learning_rate ${HL_CRITIC_LR:-6e-6} \
      --actor_weight_decay 0.1 --critic_weight_decay 0.1 --num_warmup_steps 100 \
      --actor_dropout 0.0 --critic_dropout 0.0 ${ckp_act_args} --seed ${HL_SEED:-10} \
      --num_padding_at_beginning 0 --deepspeed --output_dir ${checkpoint_path} --no_fused_kernels
