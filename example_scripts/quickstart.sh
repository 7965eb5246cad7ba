#!/usr/bin/env bash
# From a fresh clone to a trained model: makes .venv, installs, runs the three stages on the embedded example.
#
#   bash example_scripts/quickstart.sh [OPTIONS OF rlhf]      for example --seed 1
#
# A later call reuses .venv and writes to the next free folder. The line that begins with "torch" says which torch it
# uses and why; ci/environment.sh explains the choice, RLHF_TORCH and PYTHON.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source ci/environment.sh
make_environment ""

output=runs/quickstart
for ((number = 2; ; number++)); do
    [ -e "$output" ] || break
    output=runs/quickstart-$number
done

.venv/bin/rlhf --output "$output" "$@"

cat <<END

Everything is in $output:
  run.json                   settings, versions and hardware of this run
  recipe.yaml                its settings as a recipe, which --resume goes on with
  sft/ reward/ ppo/
    model/                   plain transformers loads it
    metrics.jsonl            every number of every step
    tensorboard/             the same for: .venv/bin/tensorboard --logdir $output

Talk to the model:           .venv/bin/rlhf chat $output
Make a recipe of your own:   .venv/bin/rlhf config > recipe.yaml   (every key, with its default)
See what ran here:           .venv/bin/rlhf config --example       (values for the example's tiny model alone)
END
