#!/usr/bin/env bash
# Over-optimize a reward model on purpose, and draw what it does to the quality that it was made for.
#
#   bash example_scripts/overoptimization/run.sh [FOLDER]      default: runs/overoptimization
#
# It needs no download. A later call trains only what is not complete.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
command -v rlhf >/dev/null || {
    echo "error: rlhf is not installed here; run 'bash example_scripts/quickstart.sh', then 'source .venv/bin/activate'" >&2
    exit 2
}
folder=${1:-runs/overoptimization}

# Runs that are complete are not trained again.
run() {
    local output=$1 options=()
    shift
    if [ -d "$output" ]; then options=(--resume); fi
    [ -f "$output/$1/stage.json" ] || rlhf "$@" --output "$output" ${options[@]+"${options[@]}"}
}

pairs="{path: world, limit: 269, stages: [reward]}" # 256 and those held out: few, so that the reward model is easily fooled
run "$folder/policy" sft
for name in proxy judge; do
    # Another seed draws other pairs.
    run "$folder/$name" reward --seed "$([ "$name" = proxy ] && echo 0 || echo 1)" --set "data.datasets=$pairs" \
        --set reward.model="$folder/policy/sft/model" --set reward.epochs=20
done
for coefficient in 0.1 0.05 0; do
    run "$folder/kl-$coefficient" ppo --set ppo.kl_coef="$coefficient" --set ppo.steps=100 --set ppo.eval_every=5 \
        --set ppo.eval_rows=128 --set ppo.score_clip=50 --set ppo.samples_every=0 --set ppo.actor="$folder/policy/sft/model" \
        --set ppo.reward_model="$folder/proxy/reward/model" --set ppo.judge="$folder/judge/reward/model"
done
[ -f "$folder/best-of-n.jsonl" ] || rlhf compare "$folder/policy/sft/model" --reward-model "$folder/proxy/reward/model" \
    --best-of 1,64 --limit 128 --show 0 --batch-size 256 --output "$folder/best-of-n.jsonl"

python example_scripts/overoptimization/curves.py "$folder"
