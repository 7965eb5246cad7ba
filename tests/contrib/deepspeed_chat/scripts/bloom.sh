export HL_DATASET_PATH="Dahoas/rm-static Dahoas/full-hh-rlhf" HL_BASE_OUT_PATH=/logs HL_TAG=bloom
export HL_ACTOR_ZERO_STAGE=2 HL_CRITIC_ZERO_STAGE=2 HL_ACTOR_CP_ACT=1
FORK/train_step1_bloom_1.1b.sh
FORK/train_step2_bloom_560m.sh
HL_GBS=32 FORK/train_step3_bloom_1.1b_560m.sh
