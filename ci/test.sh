#!/usr/bin/env bash
# Lint, types and tests, in .venv, which is created if it is missing.
#
#   bash ci/test.sh            what every change must pass
#   bash ci/test.sh PACKAGE    one package: ruff on its code and tests, then its tests in one process. PACKAGE is a folder
#                              of rlhf/ or tests/ (data, trainers, contrib/sweep, reference), or accelerators
#   bash ci/test.sh --all      slow tests too; prints the slowest twenty
#   bash ci/test.sh --lowest   the tests alone, on the lowest versions that pyproject.toml admits, in .venv-lowest
#   bash ci/test.sh ARGUMENTS  other arguments go to pytest, without the plugins' tests:
#                              bash ci/test.sh tests/data -k split
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Workers share the cores, so each uses one; nothing may use a network.
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

arguments=() package="" plugins=true lowest=false
if [[ ${1:-} =~ ^[a-z_]+(/[a-z_]+)?/?$ && -d tests/$1 ]]; then
    package=${1%/}
    shift
elif [[ ${1:-} == [!-]* && ! -e ${1%%::*} ]]; then # which pytest's workers pass over in silence
    packages=$(cd tests && printf '%s ' [a-z]*/ contrib/[a-z]*/)
    echo "error: $1: no such package or file; the packages are: ${packages//\/ / }" >&2
    exit 2
fi
for argument in "$@"; do
    case $argument in
    --all) arguments+=(-m "" --durations=20) ;;
    --lowest) lowest=true ;;
    *) arguments+=("$argument") plugins=false ;;
    esac
done

source ci/environment.sh
if $lowest; then
    make_environment test --lowest
    export PATH="$PWD/.venv-lowest/bin:$PATH"
else
    make_environment test,dev
    export PATH="$PWD/.venv/bin:$PATH"
fi

if [ -n "$package" ]; then
    folders=("tests/$package")
    for folder in "rlhf/$package" "$package"; do
        [ ! -d "$folder" ] || folders+=("$folder")
    done
    if ! $lowest; then
        echo "== lint of ${folders[*]}"
        ruff check "${folders[@]}"
        ruff format --check "${folders[@]}"
    fi
    echo "== tests of $package"
    exec pytest "tests/$package" ${arguments[@]+"${arguments[@]}"}
fi

if ! $lowest; then
    echo "== lint"
    ruff check .
    ruff format --check .
    echo "== types"
    mypy
fi
echo "== tests"
pytest -n auto ${arguments[@]+"${arguments[@]}"}
$plugins || exit 0

echo "== tests of the simulated Gaudi"
if $lowest; then
    echo "not run: the simulated Gaudi works with torch 2.13 alone; torch 2.9 built for CUDA takes no Gaudi next to it"
elif command -v "${CXX:-g++}" >/dev/null && python -c \
    'import pathlib, sys, sysconfig; sys.exit(not pathlib.Path(sysconfig.get_path("include"), "Python.h").exists())'; then
    cd plugins/rlhf-gaudi-sim # its device is compiled first, in about a minute, once
    pytest -n auto --dist loadfile ${arguments[@]+"${arguments[@]}"}
else
    echo "not run: they compile a C++ extension, which needs g++ and Python's header files"
fi
