#!/usr/bin/env bash
# Makes ci/bench/.trl-venv, the environment of the other side of ppo_step.py: the project's torch release and trl 1.9.2,
# the last line of TRL releases with a PPOTrainer. PYTHON=... names the interpreter it is made with.
set -euo pipefail
environment=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/.trl-venv

[ -d "$environment" ] || "${PYTHON:-python3}" -m venv "$environment"
# torch first and alone: pip then keeps this build instead of choosing one for trl.
"$environment/bin/pip" install --quiet "torch==2.13.0"
"$environment/bin/pip" install --quiet "trl==1.9.2"
"$environment/bin/python" -c 'import torch, transformers, trl; print("torch", torch.__version__, "transformers", transformers.__version__, "trl", trl.__version__)'
