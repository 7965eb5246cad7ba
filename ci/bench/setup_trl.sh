#!/usr/bin/env bash
# Makes the environments of the other sides of the benchmarks, each with the project's torch release: .trl-venv with trl
# 1.9.2, the last line of TRL releases with a PPOTrainer, and .trl-newest-venv with the newest TRL, for all others.
# A second call upgrades the latter. PYTHON=... names the interpreter they are made with.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

make_environment() {
    [ -d "$1" ] || "${PYTHON:-python3}" -m venv "$1"
    # torch first and alone: pip then keeps this build instead of choosing one for trl.
    "$1/bin/pip" install --quiet "torch==2.13.0"
    "$1/bin/pip" install --quiet --upgrade "$2"
    "$1/bin/python" -c 'import torch, transformers, trl; print("torch", torch.__version__, "transformers", transformers.__version__, "trl", trl.__version__)'
}

make_environment .trl-venv "trl[peft]==1.9.2"
make_environment .trl-newest-venv "trl[peft]"
