#!/bin/bash
# A script in the manner of the fork's example_scripts/bloom: every value is a variable with a default.
set -ex

tag=${HL_TAG-default_tag}
base_out_path=${HL_BASE_OUT_PATH:-/root/logs}
n_nodes=${HL_NUM_NODES:-1}
n_devices_per_node=${HL_DEVICES_PER_NODE:-8}
seed=${HL_SEED:-10}
mbs=${HL_MBS:-8}
gbs=${HL_GBS:-128}
zero_stage=${HL_ACTOR_ZERO_STAGE:-1}
ckp_act=${HL_ACTOR_CP_ACT:-0}
model=${HL_ACTOR_MODEL:-bigscience/bloom-1b1}
dataset_path=${HL_DATASET_PATH}
learning_rate=${HL_LEARNING_RATE:-2e-5}
lora_dim=${HL_LORA_DIM:-0}
lora_learning_rate=${HL_LORA_LEARNING_RATE:-2e-5}
hpz_enabled=${HL_HPZ_ENABLED:-0}
checkpoint_path=${HL_CHECKPOINT_PATH:-}
log_file=${HL_LOG_FILE:-$base_out_path/log.txt}

total_devices=$(($n_nodes*$n_devices_per_node))
per_device_batch=$(($gbs/$total_devices))
gas=$(($per_device_batch/$mbs))

lora_args=""
if [ "$lora_dim" -ne "0" ]; then
  lora_args=" --lora_dim ${lora_dim} --lora_module_name transformer.h. \
              --lora_learning_rate ${lora_learning_rate} --only_optimize_lora "
fi
ckp_act_args=""
if [ "$ckp_act" -eq "1" ]; then
  ckp_act_args="--gradient_checkpointing "
fi
hpz_args=""
if [ "$hpz_enabled" -ne "0" ]; then
  hpz_args="--zero_hpz_enabled "
fi
if [ -z "$checkpoint_path" ]; then
  checkpoint_path=${base_out_path}/${tag}/step1
fi
if [ "$n_nodes" -ne "1" -a -f "$HOSTSFILE" ]
then
    MULTINODE_CMD="--hostfile=$HOSTSFILE \
                   --master_addr $(head -n 1 $HOSTSFILE | sed -n s/[[:space:]]slots.*//p) "
fi
mkdir -p ${base_out_path}/logs

script_dir=$( cd -- "$( dirname -- "${BASH_SOURCE[0]}" )" &> /dev/null && pwd )
training_dir=$( realpath $script_dir/../../training)
CMD="${training_dir}/step1_supervised_finetuning/main.py \
      --model_name_or_path ${model} --data_path ${dataset_path} \
      ${lora_args} --dtype bf16 --learning_rate ${learning_rate} --dropout 0.1 \
      --per_device_train_batch_size ${mbs} --gradient_accumulation_steps ${gas} \
      --num_train_epochs 4 --num_warmup_steps 20 --zero_stage ${zero_stage} \
      ${ckp_act_args} --seed ${seed} --deepspeed --output_dir ${checkpoint_path} \
      --no_fused_kernels ${hpz_args}"

deepspeed --num_nodes ${n_nodes} \
          --num_gpus ${n_devices_per_node} \
          $MULTINODE_CMD \
          $CMD   |& tee ${log_file}
exit $PIPESTATUS
