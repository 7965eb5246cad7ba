#!/usr/bin/env bash
# Start any recipe of this folder.
#
#   bash example_scripts/run.sh RECIPE [COMMAND] [OPTIONS OF rlhf]
#
#   bash example_scripts/run.sh opt/1.3b                      all three stages, on one device
#   bash example_scripts/run.sh opt/13b --ranks 8             on eight devices of this machine
#   bash example_scripts/run.sh opt/1.3b sft                  one stage: sft, reward, ppo; or dpo
#   bash example_scripts/run.sh opt/13b plan --devices 8 --memory 40GiB
#   bash example_scripts/run.sh opt/66b --nodes 8 --node-rank 0 --rendezvous node01:29400 --ranks 8
#
# The variables HL_* of DeepSpeed-Chat's Gaudi fork apply too: `python -m rlhf.contrib.deepspeed_chat.variables` prints the
# corresponding options. Options given here take precedence over them, and both over the recipe. Paths in a recipe start
# from its folder, so runs are in runs/ of the repository; --output names another folder. PYTHON=... names another Python
# than .venv's.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

recipes() { (cd "$here" && find . -mindepth 2 -name '*.yaml' -not -path './sweeps/*' | sed 's|^\./||; s|\.yaml$||' | sort -V); }

case ${1:---help} in
-h | --help)
    sed -n '2,/^set /{/^set /d; s/^# \{0,1\}//; p}' "${BASH_SOURCE[0]}"
    printf '\nRecipes:\n'
    recipes | while read -r name; do
        printf '  %-24s %s\n' "$name" "$(sed -n '1s/^# *//p' "$here/$name.yaml")"
    done
    exit
    ;;
esac

name=${1%.yaml} && shift
recipe=$here/$name.yaml
if ! recipes | grep -xF "$name" >/dev/null; then
    printf 'run.sh: %s: no such recipe; use one of %s\n' "$name" "$(recipes | paste -sd, | sed 's/,/, /g')" >&2
    exit 2
fi
python=${PYTHON:-$here/../.venv/bin/python}
[ -n "${PYTHON:-}" ] || [ -x "$python" ] || python=python3
if ! "$python" -c 'import importlib.util as util; raise SystemExit(not util.find_spec("rlhf"))' 2>/dev/null; then
    printf 'run.sh: %s: this Python has no rlhf; run quickstart.sh, which creates .venv, or name another with PYTHON=...\n' "$python" >&2
    exit 2
fi

stages=()
case ${1:-} in
sft | reward | dpo | ppo) stages=("$1") ;;
esac
options=()
if compgen -e HL_ >/dev/null; then
    meant=$("$python" -m rlhf.contrib.deepspeed_chat.variables "${stages[@]}")
    [ -z "$meant" ] || mapfile -t options <<<"$meant"
fi
exec "$python" -m rlhf --config "$recipe" "${options[@]}" "$@"
