# Makes or reuses .venv in the repository root, with torch first and then this project.
# Sourced, from the root:   make_environment EXTRAS              (for example: make_environment test,dev)
#                           make_environment EXTRAS --lowest     .venv-lowest, with the lowest admitted versions
#
# PYTHON       the interpreter to make it with; python3 by default.
# RLHF_TORCH   the torch to install, as pip names it, or `installed`: the one that PYTHON has, whatever it is.
#              By default: a vendor's torch where PYTHON has one (what tells it: ci/versions.py); .venv is then built
#              on it, and neither it nor what it needs is replaced. Else the build that the NVIDIA GPUs and their driver
#              can run (accelerators/backends/cuda/builds.py). Without a GPU, the CPU build if one of pip's package
#              indexes has it, else the default build.
# RLHF_LOCKED  set: all but torch in the versions of ci/lock/py311.txt, which pip checks by their hashes (Python 3.11).

make_environment() {
    local extras=$1 lowest=${2:-} python=${PYTHON:-python3} folder=.venv
    [ -z "$lowest" ] || folder=.venv-lowest
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

    # The torch to build on, and why; empty: this environment has its own.
    local base="" why=""
    if [ "${RLHF_TORCH:-}" = installed ]; then
        why="as RLHF_TORCH=installed says"
        if ! base=$(version_of torch "$python"); then
            echo "error: RLHF_TORCH=installed, and $python has no torch; install one there, or name one: RLHF_TORCH=torch" >&2
            return 2
        fi
    elif [ -z "${RLHF_TORCH:-}$lowest" ]; then
        IFS=$'\t' read -r base why < <("$python" ci/versions.py vendor) || true
        why="a vendor's build, known $why"
    fi
    if [ ! -x $folder/bin/python ]; then
        echo "making $folder with $("$python" --version)"
        "$python" -m venv ${base:+--system-site-packages} $folder
    fi

    # What was installed is noted, so that a second run is quick and needs no network.
    local wanted noted=$folder/installed-for new=true
    wanted=$(printf '%s\n' "$PWD" "$extras" "${RLHF_TORCH:-}" "$base" "${RLHF_LOCKED:-}" | cat - pyproject.toml | cksum)
    if [ -f "$noted" ] && grep -qxF "$wanted" "$noted"; then
        new=false
    elif [ -n "$base" ]; then
        build_on "$base" "$python" || return
        echo "that of $python, $why; it stays as it is" >$folder/which-torch
    else
        : >$folder/constraints
        [ -z "$lowest" ] || $folder/bin/python ci/versions.py lowest >$folder/constraints
        if ! version_of torch $folder/bin/python >/dev/null || [ -n "${RLHF_TORCH:-}" ]; then
            install_torch || return
        fi
    fi
    echo "torch $(version_of torch $folder/bin/python): $(cat $folder/which-torch 2>/dev/null || echo "found in $folder")"
    if $new; then
        echo "installing rlhf"
        if [ -n "${RLHF_LOCKED:-}" ]; then
            pip_install --no-deps --require-hashes -r ci/lock/py311.txt
            pip_install --no-deps -e .
        else
            pip_install -c $folder/constraints -e ".${extras:+[$extras]}"
        fi
        echo "$wanted" >>"$noted"
    fi
}

# Lets .venv see the torch of $python, in version $base, and notes what must stay as it is there.
build_on() {
    local base=$1 python=$2 seen packages problem
    seen=$(version_of torch .venv/bin/python) || true
    if [ "$seen" != "$base" ]; then # $python may be a virtual environment itself, which a second one does not see
        packages=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
        "$python" -c 'import importlib.metadata as m; print(m.distribution("torch").locate_file(""))' >"$packages/below.pth"
        seen=$(version_of torch .venv/bin/python) || true
    fi
    if [ "$seen" != "$base" ]; then
        rm "$packages/below.pth"
        echo "error: .venv has torch $seen, and $python has torch $base, $why; to build on that: rm -r .venv; to keep .venv: RLHF_TORCH=torch==$seen" >&2
        return 2
    fi
    if ! problem=$(.venv/bin/python ci/versions.py constraints .venv/constraints); then
        echo "error: $python has torch $base, and $problem; take an image of the vendor's with such a torch, or name a torch for .venv alone: RLHF_TORCH=torch" >&2
        return 2
    fi
    [ -z "$problem" ] || echo "$problem"
}

# Installs a torch of this environment's own, and notes why that one.
install_torch() {
    local torch=torch==2.13.0 which gpus index="" # at most 2.14, the last for V100 and for drivers before 580
    [ -z "$lowest" ] || torch=$(grep '^torch==' $folder/constraints)
    if [ -n "${RLHF_TORCH:-}" ]; then
        which="RLHF_TORCH names it"
        torch=$RLHF_TORCH
    elif ! gpus=$($folder/bin/python ci/versions.py nvidia); then
        echo "error: no torch can be chosen for this machine's NVIDIA GPUs: $gpus; to use the CPU: RLHF_TORCH=$torch+cpu" >&2
        return 2
    elif [ -n "$gpus" ]; then
        local tag
        IFS=$'\t' read -r tag which <<<"$gpus"
        if [ "$tag" != - ]; then
            torch+=+$tag index=https://download.pytorch.org/whl/$tag
        else
            torch=${torch/==/===} # with ==, pip prefers 2.13.0+cpu if one of its indexes has that too
        fi
    else
        which="the CPU build; no NVIDIA GPU is found"
        echo "installing $torch for the CPU"
        if pip_install "$torch+cpu" 2>/dev/null; then
            torch=""
        else
            which="the default build; no NVIDIA GPU is found, and no package index has the CPU build"
        fi
    fi
    if [ -n "$torch" ]; then
        echo "installing $torch"
        pip_install ${index:+--extra-index-url "$index"} "$torch"
    fi
    echo "$which" >$folder/which-torch
}

pip_install() {
    $folder/bin/python -m pip install -qq --disable-pip-version-check "$@"
}

# The version of a distribution that an interpreter has; 1 where it has none.
version_of() {
    "$2" -c 'import importlib.metadata as m, sys; print(m.version(sys.argv[1]))' "$1" 2>/dev/null
}
