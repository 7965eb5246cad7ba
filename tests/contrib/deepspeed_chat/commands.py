"""Command lines of DeepSpeed-Chat's own training scripts, and of the fork's, as their users start them."""

from __future__ import annotations

_TRAINING = "applications/DeepSpeed-Chat/training"

OPT_1_3B = rf"""
# step1_supervised_finetuning/training_scripts/opt/single_gpu/run_1.3b.sh
OUTPUT=./output/actor-models/1.3b
ZERO_STAGE=0
mkdir -p $OUTPUT
deepspeed --num_gpus 1 {_TRAINING}/step1_supervised_finetuning/main.py --model_name_or_path facebook/opt-1.3b \
   --gradient_accumulation_steps 8 --lora_dim 128 --zero_stage $ZERO_STAGE \
   --enable_tensorboard \
   --tensorboard_path $OUTPUT \
   --deepspeed --output_dir $OUTPUT &> $OUTPUT/training.log
OUTPUT=./output/reward-models/350m
deepspeed --num_gpus 1 {_TRAINING}/step2_reward_model_finetuning/main.py --model_name_or_path facebook/opt-350m \
   --num_padding_at_beginning 1 --weight_decay 0.1 --dropout 0.0 --gradient_accumulation_steps 4 \
   --zero_stage $ZERO_STAGE \
   --enable_tensorboard \
   --tensorboard_path $OUTPUT \
   --deepspeed --output_dir $OUTPUT &> $OUTPUT/training.log
OUTPUT=./output/step3-models/1.3b
deepspeed --num_gpus 1 {_TRAINING}/step3_rlhf_finetuning/main.py \
   --actor_model_name_or_path ./output/actor-models/1.3b --critic_model_name_or_path ./output/reward-models/350m \
   --actor_zero_stage 0 --critic_zero_stage 0 \
   --num_padding_at_beginning 1 --gradient_accumulation_steps 2 \
   --deepspeed --actor_lora_dim 128 --enable_hybrid_engine --actor_gradient_checkpointing --actor_dropout 0.0 \
   --output_dir $OUTPUT &> $OUTPUT/training.log
"""

OPT_13B = rf"""
# single_node, on eight devices, and offloaded as in the sweep of step 3
deepspeed --num_gpus 8 {_TRAINING}/step1_supervised_finetuning/main.py \
   --data_path Dahoas/rm-static Dahoas/full-hh-rlhf \
   --data_split 2,4,4 \
   --model_name_or_path facebook/opt-13b \
   --per_device_train_batch_size 4 \
   --per_device_eval_batch_size 4 \
   --max_seq_len 512 \
   --learning_rate 1e-4 \
   --weight_decay 0. \
   --num_train_epochs 16  \
   --gradient_accumulation_steps 1 \
   --lr_scheduler_type cosine \
   --num_warmup_steps 0 \
   --seed 1234 \
   --gradient_checkpointing \
   --zero_stage 3 \
   --offload \
   --lora_dim 128 \
   --lora_module_name decoder.layers. \
   --deepspeed \
   --output_dir output/actor-models/13b \
   &> output/actor-models/13b/training.log
deepspeed --num_gpus 8 {_TRAINING}/step2_reward_model_finetuning/main.py \
   --data_path Dahoas/rm-static Dahoas/full-hh-rlhf stanfordnlp/SHP \
   --data_split 2,4,4 \
   --model_name_or_path facebook/opt-350m \
   --num_padding_at_beginning 1 \
   --per_device_train_batch_size 8 \
   --per_device_eval_batch_size 8 \
   --max_seq_len 512 \
   --learning_rate 5e-5 \
   --weight_decay 0.1 \
   --num_train_epochs 1 \
   --gradient_accumulation_steps 1 \
   --lr_scheduler_type cosine \
   --num_warmup_steps 0 \
   --seed 1234 \
   --zero_stage 0 \
   --deepspeed \
   --output_dir output/reward-models/350m
deepspeed --num_gpus 8 --master_port 12346 {_TRAINING}/step3_rlhf_finetuning/main.py \
   --data_path Dahoas/rm-static \
   --data_split 2,4,4 \
   --actor_model_name_or_path output/actor-models/13b \
   --critic_model_name_or_path output/reward-models/350m \
   --num_padding_at_beginning 1 \
   --per_device_generation_batch_size 16 \
   --per_device_training_batch_size 16 \
   --generation_batches 1 \
   --ppo_epochs 1 \
   --max_answer_seq_len 256 \
   --max_prompt_seq_len 256 \
   --actor_learning_rate 5e-4 \
   --critic_learning_rate 5e-6 \
   --num_train_epochs 1 \
   --lr_scheduler_type cosine \
   --gradient_accumulation_steps 1 \
   --num_warmup_steps 100 \
   --deepspeed --seed 1234 \
   --enable_hybrid_engine \
   --inference_tp_size 2 \
   --offload --offload_reference_model \
   --actor_zero_stage 3 \
   --critic_zero_stage 3 \
   --actor_gradient_checkpointing \
   --actor_dropout 0.0 \
   --actor_lora_dim 128 \
   --actor_lora_module_name decoder.layers. \
   --output_dir ./output/step3-models/13b \
    &> ./output/step3-models/13b/training.log
"""

LLAMA_2_7B = r"""
OUTPUT=./output_step1_llama2_7b
ZERO_STAGE=3
deepspeed training/step1_supervised_finetuning/main.py \
   --data_path Dahoas/rm-static Dahoas/full-hh-rlhf \
   Dahoas/synthetic-instruct-gptj-pairwise yitingxie/rlhf-reward-datasets \
   --data_split 2,4,4 \
   --model_name_or_path meta-llama/Llama-2-7b-hf \
   --per_device_train_batch_size 4 \
   --per_device_eval_batch_size 4 \
   --max_seq_len 512 \
   --learning_rate 9.65e-6 \
   --weight_decay 0. \
   --num_train_epochs 4  \
   --gradient_accumulation_steps 1 \
   --lr_scheduler_type cosine \
   --num_warmup_steps 0 \
   --seed 1234 \
   --gradient_checkpointing \
   --zero_stage $ZERO_STAGE \
   --deepspeed \
   --output_dir $OUTPUT \
   &> $OUTPUT/training.log
OUTPUT=./output_step2_llama_7b_epoch1_lr9.65e-6
deepspeed training/step2_reward_model_finetuning/main.py \
   --data_path Dahoas/rm-static \
   --data_split 2,4,4 \
   --model_name_or_path meta-llama/Llama-2-7b-hf \
   --per_device_train_batch_size 8 \
   --per_device_eval_batch_size 8 \
   --max_seq_len 512 \
   --learning_rate 9.65e-6 \
   --weight_decay 0.1 \
   --num_padding_at_beginning 0 \
   --num_train_epochs 1  \
   --gradient_accumulation_steps 1 \
   --lr_scheduler_type cosine \
   --num_warmup_steps 0 \
   --seed 1234 \
   --gradient_checkpointing \
   --zero_stage $ZERO_STAGE \
   --deepspeed \
   --offload \
   --output_dir $OUTPUT \
   &> $OUTPUT/training.log
Num_Padding_at_Beginning=1 # this is model related
Actor_Lr=9.65e-6
Critic_Lr=5e-6
deepspeed --master_port 12346 training/step3_rlhf_finetuning/main.py \
   --data_path Dahoas/rm-static \
   --data_split 2,4,4 \
   --actor_model_name_or_path $ACTOR_MODEL_PATH \
   --critic_model_name_or_path $CRITIC_MODEL_PATH \
   --num_padding_at_beginning 1 \
   --per_device_generation_batch_size 1 \
   --per_device_training_batch_size 1 \
   --generation_batches 1 \
   --ppo_epochs 1 \
   --max_answer_seq_len 256 \
   --max_prompt_seq_len 256 \
   --actor_learning_rate ${Actor_Lr} \
   --critic_learning_rate ${Critic_Lr} \
   --actor_weight_decay 0.1 \
   --critic_weight_decay 0.1 \
   --num_train_epochs 1 \
   --lr_scheduler_type cosine \
   --gradient_accumulation_steps 1 \
   --actor_gradient_checkpointing \
   --critic_gradient_checkpointing \
   --offload_reference_model \
   --actor_dropout 0.0 \
   --num_warmup_steps 100 \
   --deepspeed --seed 1234 \
   --actor_zero_stage $ZERO_STAGE \
   --critic_zero_stage $ZERO_STAGE \
   --enable_hybrid_engine \
   --output_dir ./output_step3_llama \
    &> ./output_step3_llama/training.log
"""

BLOOM = r"""
export HL_DATASET_PATH="Dahoas/rm-static Dahoas/full-hh-rlhf" HL_BASE_OUT_PATH=/logs HL_TAG=bloom
export HL_ACTOR_ZERO_STAGE=2 HL_CRITIC_ZERO_STAGE=2 HL_ACTOR_CP_ACT=1
./example_scripts/bloom/train_step1_bloom_1.1b.sh
./example_scripts/bloom/train_step2_bloom_560m.sh
HL_GBS=32 ./example_scripts/bloom/train_step3_bloom_1.1b_560m.sh
"""

OPT_350M = r"""
deepspeed --num_gpus 1 main.py --model_name_or_path facebook/opt-350m \
   --num_padding_at_beginning 1 --weight_decay 0.1 --disable_dropout --gradient_accumulation_steps 4 --zero_stage 0 \
   --enable_tensorboard \
   --tensorboard_path ./output \
   --deepspeed --output_dir ./output &> ./output/training.log
"""
