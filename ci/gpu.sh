#!/usr/bin/env bash
# What needs a real device: the conformance kit, the three stages in bf16 and fp16, ZeRO 0-3, and generation with
# and without recorded steps. Takes some minutes on one GPU and writes ci/results/<backend>-<chip>.json.
#
#   bash ci/gpu.sh                       on a machine with an NVIDIA GPU
#   bash ci/gpu.sh --accelerator NAME    any other backend
#   bash ci/gpu.sh --help
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source ci/environment.sh
make_environment test
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
if nvidia-smi -L >/dev/null 2>&1; then
    CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0} .venv/bin/pytest -q tests/accelerators/test_cuda_on_gpu.py
fi
exec .venv/bin/python ci/gpu.py "$@"
