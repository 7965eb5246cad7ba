#!/usr/bin/env bash
# PPO on the first machine of a SLURM job, with rollouts by the other machines: a server on each of their devices.
#
#   sbatch --nodes 3 --gpus-per-node 8 example_scripts/rollouts/slurm.sh recipe.yaml /shared/runs/mine
#
# /shared/runs/mine has the SFT and the reward model already (`rlhf --stages sft,reward`). All machines see the folder.
# A job without --gpus-per-node has one server on each machine. Options after the folder go to `rlhf ppo`.
set -euo pipefail
recipe=${1:?the recipe} run=${2:?the folder of the run}
shift 2

mapfile -t machines < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
if ((${#machines[@]} < 2)); then
    echo "error: the job has one machine; ask for two or more: sbatch --nodes 2" >&2
    exit 2
fi
trainer=${machines[0]} others=("${machines[@]:1}")
devices=${SLURM_GPUS_ON_NODE:-1}
port=8653

# Every request must send it. SLURM hands it to the tasks in their environment.
RLHF_SERVE_TOKEN=$(python3 -c 'import secrets; print(secrets.token_hex(32))')
export RLHF_SERVE_TOKEN

# A task sees one device, and has a port to itself.
per_task=()
[ -z "${SLURM_GPUS_ON_NODE:-}" ] || per_task=(--gpus-per-task 1)
srun --overlap --nodes "${#others[@]}" --nodelist "$(IFS=,; echo "${others[*]}")" --ntasks-per-node "$devices" \
    "${per_task[@]}" bash -c 'exec rlhf serve "$0" --rollouts --host 0.0.0.0 --port $(('"$port"' + SLURM_LOCALID))' \
    "$run/sft" &
servers=$!
trap 'kill "$servers" 2>/dev/null; wait "$servers" || true' EXIT

addresses=()
for machine in "${others[@]}"; do
    for ((device = 0; device < devices; device++)); do
        addresses+=("http://$machine:$((port + device))")
    done
done
for address in "${addresses[@]}"; do # a model of this size is loaded in its own time
    until python3 -c "import sys, urllib.request; urllib.request.urlopen(sys.argv[1] + '/health', timeout=5)" \
        "$address" 2>/dev/null; do
        kill -0 "$servers" || { echo "error: the servers have ended; see above" >&2; exit 1; }
        sleep 2
    done
done

srun --overlap --nodes 1 --nodelist "$trainer" --ntasks 1 rlhf ppo --config "$recipe" --output "$run" \
    --ranks "$devices" --set "ppo.rollout.where=[$(IFS=,; echo "${addresses[*]}")]" "$@"
