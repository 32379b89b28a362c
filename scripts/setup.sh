# Sourced by the other scripts: makes .venv with everything installed, once, and activates it.
#
# Reads PYTHON (default: the newest python3.10-3.13 found). Installs torch by exact version first, so that no
# package chooses another build. Runs again only when setup.cfg, pyproject.toml or this file has changed.

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export TOKENIZERS_PARALLELISM=false
export PIP_DISABLE_PIP_VERSION_CHECK=1
# Large arrays go back and forth every step: let the allocator keep them instead of asking the kernel again.
export MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=1073741824 MALLOC_TOP_PAD_=67108864
TORCH_VERSION=2.13.0

say() { printf '== %s\n' "$*"; }

install() { # quiet; tried twice, for networks fail; the end of pip's output is shown when both fail
    .venv/bin/python -m pip install "$@" >.venv/install.log 2>&1 && return
    say "pip failed: once more"
    sleep 5
    .venv/bin/python -m pip install "$@" >>.venv/install.log 2>&1 && return
    tail -n 20 .venv/install.log >&2
    echo "error: pip could not install $* (the whole log is .venv/install.log); is there a network?" >&2
    return 1
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3 python3.12 python3.11 python3.10 python3.13; do
        if "$candidate" -c 'import sys; sys.exit(not ((3, 10) <= sys.version_info[:2] <= (3, 13)))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "error: no Python from 3.10 to 3.13 was found; install one or set PYTHON=/path/to/python3" >&2
    return 2
}

setup() {
    local python stamp
    stamp="$(cat setup.cfg pyproject.toml scripts/setup.sh | cksum | tr ' ' '-')"
    if [ "$(cat .venv/.rlhfuse-setup 2>/dev/null)" != "$stamp" ]; then
        python="$(find_python)" || return 2
        if [ ! -x .venv/bin/python ]; then
            say "creating .venv with $("$python" --version)"
            "$python" -m venv .venv || {
                echo "error: $python cannot make a virtual environment; install its venv package (python3-venv)" >&2
                return 2
            }
        fi
        command -v cc >/dev/null 2>&1 || command -v gcc >/dev/null 2>&1 || {
            echo "error: no C compiler (cc or gcc) was found; install one (build-essential)" >&2
            return 2
        }
        say "installing torch $TORCH_VERSION (a few minutes the first time)"
        install "torch==$TORCH_VERSION" || return 1
        say "installing rlhfuse and its other dependencies"
        install "torch==$TORCH_VERSION" -e '.[mpi,test]' || return 1
        echo "$stamp" > .venv/.rlhfuse-setup
        say "installed"
    fi
    # shellcheck disable=SC1091
    . .venv/bin/activate
    if [ "$(id -u)" = 0 ]; then
        export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 # mpirun refuses root unless told twice
    fi
}
