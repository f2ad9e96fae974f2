#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
#   nemo_test.sh [PYTHON]     compares the reference with nemo-automodel, an independent implementation on torch
#
# Makes .venv-nemo: torch with what it depends on (about 5 GB), nemo-automodel without, from the dependency group "nemo".
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3}
venv=.venv-nemo

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
# requirements nemo | others: the group's packages that are nemo-automodel, or everything else that the tests import
requirements() {
    "$venv/bin/python" - "$1" <<'PY'
import sys
import tomllib

with open("pyproject.toml", "rb") as file:
    settings = tomllib.load(file)
project = settings["project"]
wanted = [*settings["dependency-groups"]["nemo"], *project["optional-dependencies"]["test"]]
wanted += [line for line in project["dependencies"] if line.startswith(("numpy", "ml-dtypes"))]
print(*(line for line in wanted if line.startswith("nemo-") == (sys.argv[1] == "nemo")), sep="\n")
PY
}
echo "Installing torch and nemo-automodel into $venv"
requirements others | "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -r /dev/stdin
requirements nemo | "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps -r /dev/stdin
PYTHONPATH=. "$venv/bin/python" -m pytest -m nemo tests/unit/reference/test_nemo.py
