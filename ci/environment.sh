# Makes or reuses .venv in the repository root, with torch first and then this project.
# Sourced, from the root:   make_environment EXTRAS      (for example: make_environment test,dev)
#
# RLHF_TORCH   the torch to install, as pip names it; by default the CPU build where no GPU is found and one
#              of pip's package indexes has it, else the default build.

make_environment() {
    local extras=$1 python=${PYTHON:-python3}
    if ! "$python" -c '' 2>/dev/null; then
        echo "error: $python cannot be run; install Python 3.10 or later, or name it: PYTHON=/path/to/python3" >&2
        return 2
    fi
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
        echo "error: $("$python" --version 2>&1) is too old; install 3.10 or later, or name it: PYTHON=/path/to/python3" >&2
        return 2
    fi
    if ! "$python" -c 'import venv, ensurepip' 2>/dev/null; then
        echo "error: $python cannot make virtual environments; install its venv and pip packages (python3-venv)" >&2
        return 2
    fi
    if [ ! -x .venv/bin/python ]; then
        echo "making .venv with $("$python" --version)"
        "$python" -m venv .venv
    fi

    # What was installed is noted, so that a second run is quick and needs no network.
    local wanted noted=.venv/installed-for
    wanted=$(printf '%s\n' "$PWD" "$extras" "${RLHF_TORCH:-}" | cat - pyproject.toml | cksum)
    if [ -f "$noted" ] && grep -qxF "$wanted" "$noted"; then
        return 0
    fi
    if ! .venv/bin/python -c 'import importlib.metadata as m; m.version("torch")' 2>/dev/null || [ -n "${RLHF_TORCH:-}" ]; then
        install_torch
    fi
    echo "installing rlhf"
    .venv/bin/python -m pip install -qq --disable-pip-version-check -e ".${extras:+[$extras]}"
    echo "$wanted" >>"$noted"
}

install_torch() {
    local pip=(.venv/bin/python -m pip install -qq --disable-pip-version-check)
    if [ -n "${RLHF_TORCH:-}" ]; then
        echo "installing $RLHF_TORCH"
        "${pip[@]}" "$RLHF_TORCH"
    elif has_gpu; then
        echo "installing torch"
        "${pip[@]}" "torch==2.13.0"
    else
        echo "installing torch for the CPU"
        "${pip[@]}" "torch==2.13.0+cpu" 2>/dev/null || "${pip[@]}" "torch==2.13.0"
    fi
}

has_gpu() {
    { command -v nvidia-smi && nvidia-smi -L; } >/dev/null 2>&1 || { command -v hl-smi && hl-smi -L; } >/dev/null 2>&1
}
