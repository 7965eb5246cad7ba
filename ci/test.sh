#!/usr/bin/env bash
# Lint, types and tests, in .venv, which is made where it is missing.
#
#   bash ci/test.sh            what every change must pass
#   bash ci/test.sh --all      slow tests too
#   bash ci/test.sh ARGUMENTS  further arguments go to pytest: bash ci/test.sh tests/data -k split
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source ci/environment.sh
make_environment test,dev
export PATH="$PWD/.venv/bin:$PATH"

# Workers share the cores, so each uses one; nothing may reach for a network.
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

arguments=()
for argument in "$@"; do
    if [ "$argument" = --all ]; then arguments+=(-m ""); else arguments+=("$argument"); fi
done

echo "== lint"
ruff check .
ruff format --check .
echo "== types"
mypy
echo "== tests"
exec pytest -n auto ${arguments[@]+"${arguments[@]}"}
