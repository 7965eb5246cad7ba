#!/usr/bin/env bash
# Writes ci/lock/py311.txt: the version and the hashes of every package that the tests need on Python 3.11, but for
# torch and what torch brings, whose build depends on the machine. ci/environment.sh installs from it with RLHF_LOCKED=1.
#
#   bash ci/lock.sh             the newest admitted versions
#   bash ci/lock.sh --audit     write build/sbom.json of the lock (CycloneDX), and ask PyPI for known vulnerabilities
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

folder=.venv-lock
[ -x $folder/bin/python ] || python3 -m venv $folder
case ${1:-} in
--audit)
    $folder/bin/python -m pip install -qq --disable-pip-version-check cyclonedx-bom pip-audit
    mkdir -p build
    $folder/bin/cyclonedx-py requirements ci/lock/py311.txt --pyproject pyproject.toml --of JSON -o build/sbom.json
    exec $folder/bin/pip-audit --require-hashes --disable-pip -r ci/lock/py311.txt
    ;;
"") ;;
*)
    echo "error: $1: not an option; use none, or --audit" >&2
    exit 2
    ;;
esac
$folder/bin/python -m pip install -qq --disable-pip-version-check uv
mkdir -p ci/lock
$folder/bin/uv pip compile pyproject.toml --extra test --extra dev --python-version 3.11 --generate-hashes \
    --upgrade --quiet --no-header --no-annotate --output-file ci/lock/all.txt >/dev/null
{
    echo "# Written by ci/lock.sh: what the tests need on Python 3.11, but for torch and what it brings."
    $folder/bin/python - <<'PYTHON'
import re
from pathlib import Path

entries = re.split(r"\n(?=\S)", Path("ci/lock/all.txt").read_text().strip())
print("\n".join(entry for entry in entries if not re.match(r"(torch|triton|nvidia-(?!ml-py)\S*|cuda-\S*)==", entry)))
PYTHON
} >ci/lock/py311.txt
rm ci/lock/all.txt
