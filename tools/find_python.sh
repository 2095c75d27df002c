#!/usr/bin/env bash
# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
#
# Print the path of a Python interpreter >= 3.12 with the venv module.
#
# $PYTHON, if set, is the only candidate. Otherwise: python3.12, python3.13, ..., python3 and python in every folder of
# PATH, then pyenv's versions. The oldest of them is taken, because constraints.txt is tested on 3.12. Exit status 2 if
# there is none.
#
# A script of our own: package managers that find interpreters, such as uv, have to be installed first, which needs an
# interpreter.
set -u

names=(python3.12 python3.13 python3.14 python3.15 python3 python)

# Run a candidate: a shim of a version manager may be called python3.12 and fail. Print "MINOR PATH"; PATH is the
# interpreter behind any shim or virtual environment.
probe() {
    "$1" -c '
import sys
import ensurepip, venv
if sys.version_info[:2] < (3, 12) or sys.version_info[0] != 3:
    sys.exit(1)
print(sys.version_info[1], getattr(sys, "_base_executable", None) or sys.executable)
' 2>/dev/null </dev/null
}

candidates() {
    local name version root
    for name in "${names[@]}"; do
        type -aP "$name"
    done
    for root in "${PYENV_ROOT:-}" "${HOME:-}/.pyenv"; do
        [ -n "$root" ] || continue
        for version in "$root"/versions/3.*/bin/python; do
            [ -x "$version" ] && echo "$version"
        done
    done
}

if [ -n "${PYTHON:-}" ]; then
    if found=$(probe "$PYTHON"); then
        echo "${found#* }"
        exit 0
    fi
    echo "PYTHON=$PYTHON does not run, is older than 3.12, or lacks the venv module." \
        "Set PYTHON to an interpreter >= 3.12, or unset it to search for one." >&2
    exit 2
fi

best_minor=''
best=''
while IFS= read -r candidate; do
    found=$(probe "$candidate") || continue
    minor=${found%% *}
    case $minor in '' | *[!0-9]*) continue ;; esac
    if [ -z "$best" ] || [ "$minor" -lt "$best_minor" ]; then
        best_minor=$minor
        best=${found#* }
    fi
done < <(candidates)

if [ -z "$best" ]; then
    cat >&2 <<'MESSAGE'
No working Python >= 3.12 found on PATH or among pyenv's versions.
Install one, with its venv module, for example:
  apt install python3.12 python3.12-venv      (Debian, Ubuntu)
  dnf install python3.12                      (Fedora, RHEL)
  brew install python@3.12                    (macOS)
  pyenv install 3.12                          (any)
or name an interpreter: make setup PYTHON=/path/to/python3.12
MESSAGE
    exit 2
fi
echo "$best"
