#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
#   setup_venv.sh PYTHON VENV     makes VENV unless it is there, and installs what building and testing need
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1 venv=$2

die() { echo "setup_venv.sh: $*" >&2; exit 1; }

# install_package PACKAGE: from Debian, where we may
install_package() {
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        die "needs the package $1: sudo apt-get install $1"
    fi
    echo "Installing $1"
    export DEBIAN_FRONTEND=noninteractive
    apt-get install -y -qq "$1" >/dev/null 2>&1 \
        || { apt-get update -qq && apt-get install -y -qq "$1" >/dev/null; } || die "apt-get could not install $1"
}

if [ ! -x "$venv/bin/python" ]; then
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
        || die "expected Python 3.11 or newer, got $("$python" --version 2>&1); name another with PYTHON=python3.12"
    "$python" -c 'import ensurepip' 2>/dev/null || install_package python3-venv
    "$python" -m venv "$venv"
fi
if [ ! -e /usr/include/gtest/gtest.h ] && [ -z "${GTest_ROOT:-}" ]; then
    install_package libgtest-dev
fi

echo "Installing Python packages into $venv"
"$venv/bin/python" - <<'PY' | "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -r /dev/stdin
import tomllib

with open("pyproject.toml", "rb") as file:
    settings = tomllib.load(file)
project = settings["project"]
extras = project["optional-dependencies"]
groups = [settings["build-system"]["requires"], project["dependencies"], *extras.values()]
print(*[requirement for group in groups for requirement in group], "cmake>=3.25", "ninja", sep="\n")
PY
