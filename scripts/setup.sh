# Sourced by the other scripts: makes .venv with everything installed, once, and puts it first on PATH.
#
# PYTHON         makes .venv; default: the first of python3, python3.10-3.13 that is 3.10 to 3.13
# RLHFUSE_VENV   an environment that is there already (venv, conda, a container's /usr) instead of .venv; its torch stays
# TORCH_INDEX    the package index that torch comes from, such as the one for CPUs or for another CUDA
# TORCH_VERSION  of a new torch
# Runs again only when setup.cfg, pyproject.toml, this file or TORCH_INDEX has changed.

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export TOKENIZERS_PARALLELISM=false
export PIP_DISABLE_PIP_VERSION_CHECK=1
# Large arrays go back and forth every step: let the allocator keep them instead of asking the kernel again.
export MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=1073741824 MALLOC_TOP_PAD_=67108864
TORCH_VERSION=${TORCH_VERSION:-2.13.0}
TRITON='triton>=3.6,<3.8' # of torch 2.11 to 2.13, whose builds for CPUs bring none

say() { printf '== %s\n' "$*"; }

fail() {
    echo "error: $*" >&2
    return 2
}

python_fits() { "$1" -c 'import sys; sys.exit(not ((3, 10) <= sys.version_info[:2] <= (3, 13)))' 2>/dev/null; }

find_python() {
    local candidate
    for candidate in "${PYTHON:-python3}" python3 python3.12 python3.11 python3.10 python3.13; do
        if python_fits "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    fail "no Python from 3.10 to 3.13 was found; install one or set PYTHON=/path/to/python3"
}

# Where packages go: sets `there`, the environment, and `python`, its interpreter.
find_environment() {
    local maker
    there=${RLHFUSE_VENV:-.venv} python=
    if [ ! -x "$there/bin/python" ] && [ -z "${RLHFUSE_VENV:-}" ]; then
        maker="$(find_python)" || return 2
        say "creating .venv with $("$maker" --version)"
        "$maker" -m venv .venv || {
            fail "$maker cannot make a virtual environment; install its venv package (python3-venv)"
            return
        }
    fi
    there="$(cd "$there" 2>/dev/null && pwd)" || there=$RLHFUSE_VENV
    for python in "$there/bin/python" "$there/bin/python3"; do
        if python_fits "$python"; then return; fi
    done
    fail "$there has no Python from 3.10 to 3.13 in bin/; set RLHFUSE_VENV to an environment that has, or remove .venv"
}

install() { # quiet; tried twice, for networks fail; the end of pip's output is shown when both fail
    local log="$there/rlhfuse-install.log"
    "$python" -m pip install --no-compile "$@" >"$log" 2>&1 && return
    say "pip failed: once more"
    sleep 5
    "$python" -m pip install --no-compile "$@" >>"$log" 2>&1 && return
    tail -n 20 "$log" >&2
    echo "error: pip could not install $* (the whole log is $log); is there a network?" >&2
    return 1
}

# Everything into the environment: the index that torch came from the last time, an extra beside the usual one.
install_all() {
    local has torch="torch==$TORCH_VERSION"
    command -v cc >/dev/null 2>&1 || command -v gcc >/dev/null 2>&1 || {
        fail "no C compiler (cc or gcc) was found; install one (build-essential)"
        return
    }
    has="$("$python" -c 'from importlib import metadata; print(metadata.version("torch"))' 2>/dev/null)" || has=
    if [ -n "$has" ] && [ -n "${RLHFUSE_VENV:-}" ]; then
        say "torch $has stays as it is"
        torch="torch==$has"
    elif [ -n "$TORCH_INDEX" ]; then
        say "installing torch $TORCH_VERSION from $TORCH_INDEX"
        if [ "$TORCH_INDEX" = "$1" ]; then has=; fi
        install ${has:+--force-reinstall} --index-url "$TORCH_INDEX" "$torch" || return
    elif [ -z "$has" ] && [ ! -e /proc/driver/nvidia ]; then
        say "no NVIDIA driver here: torch's build for CPUs is a tenth as large. To have that one, stop this, set"
        say "TORCH_INDEX to the index that pytorch.org/get-started/locally shows for 'CPU', and start again"
    fi
    say "installing rlhfuse and what it needs (a few minutes the first time; torch with CUDA has some GB)"
    install "$torch" -e ".[mpi${2:+,$2}]" || return
    if [ "$2" = test ] && ! "$python" -c 'import triton' 2>/dev/null; then
        install "$TRITON" || return
    fi
    if [ "$2" = test ] || [ -n "${PYTHONDONTWRITEBYTECODE:-}" ]; then # else Python compiles what it imports, a tenth
        "$python" -c 'import compileall, sysconfig; compileall.compile_dir(sysconfig.get_path("purelib"), quiet=2, workers=0)' \
            >>"$there/rlhfuse-install.log" 2>&1 || true # a package may hold files that are no modules
    fi
}

# `setup`, or `setup test` with what the tests need beside.
setup() {
    local there python made stamp last
    find_environment || return
    made="$there/.rlhfuse-setup" # torch's index, then what was installed
    last="$(sed -n 1p "$made" 2>/dev/null)" || last=
    TORCH_INDEX=${TORCH_INDEX:-$last}
    stamp="$TORCH_INDEX"$'\n'"$(cat setup.cfg pyproject.toml scripts/setup.sh | cksum) $TORCH_VERSION $PWD"
    case "$(cat "$made" 2>/dev/null)" in
        "$stamp ${1:-}" | "$stamp test") ;;
        *)
            install_all "$last" "${1:-}" || return
            echo "$stamp ${1:-}" >"$made"
            say "installed"
            ;;
    esac
    export PATH="$there/bin:$PATH"
    if [ "$(id -u)" = 0 ]; then
        export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 # mpirun refuses root unless told twice
    fi
}
