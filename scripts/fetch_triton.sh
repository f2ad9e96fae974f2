#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
#   fetch_triton.sh FOLDER PYTHON     unpacks a Triton Inference Server with its python backend into FOLDER
#
# It is the one inside the wheel nvidia-pytriton. The wheel is not installed, because its Python package wants numpy 1.
set -euo pipefail

version=0.7.0
folder=${1:?usage: fetch_triton.sh FOLDER PYTHON}
python=${2:?usage: fetch_triton.sh FOLDER PYTHON}

if [ "$(cat "$folder/.version" 2>/dev/null)" = "$version" ]; then
    exit 0
fi
echo "Fetching Triton Inference Server (nvidia-pytriton $version)"
rm -rf "$folder"
mkdir -p "$folder"
"$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
    --platform manylinux_2_35_x86_64 --dest "$folder" "nvidia-pytriton==$version"
"$python" -m zipfile -e "$folder"/nvidia_pytriton-*.whl "$folder"
rm "$folder"/nvidia_pytriton-*.whl
chmod +x "$folder/pytriton/tritonserver/bin/tritonserver"
echo "$version" >"$folder/.version"
