#!/usr/bin/env bash
# Create .venv, install rlhf, and run the three stages on the embedded example.
#
#   bash example_scripts/quickstart.sh [OPTIONS OF rlhf]      for example --seed 1
#
# A later call reuses .venv and writes to the next free folder. The line that begins with "torch" names the torch that is
# used, and the reason; ci/environment.sh explains the choice, RLHF_TORCH and PYTHON.
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
  report.html                the page that explains this run: open it in a browser
  run.json                   settings, versions and hardware of this run
  recipe.yaml                its settings as a recipe, which --resume uses
  sft/ reward/ ppo/
    model/                   plain transformers loads it
    metrics.jsonl            every number of every step
    tensorboard/             the same for: .venv/bin/tensorboard --logdir $output

Talk to the model:           .venv/bin/rlhf chat $output
Write a recipe:              .venv/bin/rlhf config > recipe.yaml   (every key, with its default)
See what ran here:           .venv/bin/rlhf config --example       (values only for the example's tiny model)
END
