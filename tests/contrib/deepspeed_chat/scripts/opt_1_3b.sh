# step1_supervised_finetuning/training_scripts/opt/single_gpu/run_1.3b.sh
OUTPUT=./output/actor-models/1.3b
ZERO_STAGE=0
mkdir -p $OUTPUT
deepspeed --num_gpus 1 applications/DeepSpeed-Chat/training/step1_supervised_finetuning/main.py --model_name_or_path facebook/opt-1.3b \
   --gradient_accumulation_steps 8 --lora_dim 128 --zero_stage $ZERO_STAGE \
   --enable_tensorboard \
   --tensorboard_path $OUTPUT \
   --deepspeed --output_dir $OUTPUT &> $OUTPUT/training.log
OUTPUT=./output/reward-models/350m
deepspeed --num_gpus 1 applications/DeepSpeed-Chat/training/step2_reward_model_finetuning/main.py --model_name_or_path facebook/opt-350m \
   --num_padding_at_beginning 1 --weight_decay 0.1 --dropout 0.0 --gradient_accumulation_steps 4 \
   --zero_stage $ZERO_STAGE \
   --enable_tensorboard \
   --tensorboard_path $OUTPUT \
   --deepspeed --output_dir $OUTPUT &> $OUTPUT/training.log
OUTPUT=./output/step3-models/1.3b
deepspeed --num_gpus 1 applications/DeepSpeed-Chat/training/step3_rlhf_finetuning/main.py \
   --actor_model_name_or_path ./output/actor-models/1.3b --critic_model_name_or_path ./output/reward-models/350m \
   --actor_zero_stage 0 --critic_zero_stage 0 \
   --num_padding_at_beginning 1 --gradient_accumulation_steps 2 \
   --deepspeed --actor_lora_dim 128 --enable_hybrid_engine --actor_gradient_checkpointing --actor_dropout 0.0 \
   --output_dir $OUTPUT &> $OUTPUT/training.log
