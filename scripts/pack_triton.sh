#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
#   pack_triton.sh ARCHIVE PYTHON     packs what tests/gpu/test_triton.py needs on a machine without a network
#
# Unpack it into .triton there (tar -C .triton -xf ARCHIVE). PYTHON must be of the version that the machine has. Goes in:
# the server of scripts/fetch_triton.sh with the stub for that version; tritonclient and what it needs except numpy and
# ml_dtypes (.triton/site); the interpreter with its shared library (.triton/python), since many machines have a Python
# without one, and the stub is linked to it.
set -euo pipefail
cd "$(dirname "$0")/.."
archive=$(realpath -m "${1:?usage: pack_triton.sh ARCHIVE PYTHON}")
python=${2:?usage: pack_triton.sh ARCHIVE PYTHON}

scripts/fetch_triton.sh .triton "$python"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
base=$("$python" -c 'import sys; print(sys.base_prefix)')

mkdir -p "$work/pytriton/tritonserver/python_backend_stubs"
cp -r .triton/.version .triton/nvidia_pytriton.libs "$work/"
cp -r .triton/pytriton/tritonserver/{bin,backends} "$work/pytriton/tritonserver/"
cp -r ".triton/pytriton/tritonserver/python_backend_stubs/$version" "$work/pytriton/tritonserver/python_backend_stubs/"
rm -f "$work"/nvidia_pytriton.libs/libpython3*.so*

"$python" -m pip install --quiet --disable-pip-version-check --no-compile --target "$work/site" \
    --only-binary=:all: "tritonclient[http,grpc]==$("$python" -m pip show tritonclient | sed -n 's/^Version: //p')"
rm -rf "$work"/site/{numpy,numpy.libs,numpy-*,ml_dtypes,ml_dtypes-*,perf_analyzer*,bin,scripts}

mkdir -p "$work/python/bin" "$work/python/lib"
cp "$base/bin/python$version" "$work/python/bin/"
# It finds its library, wherever it is unpacked. (The stub only looks where a python3 on PATH is.)
cat >"$work/python/bin/python3" <<SH
#!/bin/sh
here=\$(dirname "\$(readlink -f "\$0")")
LD_LIBRARY_PATH=\$here/../lib\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH} exec "\$here/python$version" "\$@"
SH
chmod +x "$work/python/bin/python3"
cp -L "$base/lib/libpython$version.so.1.0" "$work/python/lib/"
strip --strip-unneeded "$work/python/lib/libpython$version.so.1.0"
tar -C "$base/lib" --exclude='__pycache__' --exclude='site-packages' --exclude='test' --exclude='tests' \
    --exclude='idlelib' --exclude='tkinter' --exclude='turtledemo' --exclude='ensurepip' --exclude='lib2to3' \
    --exclude='config-*' --exclude='_test*' --exclude='pydoc_data' -cf - "python$version" | tar -C "$work/python/lib" -xf -
find "$work/python/lib" "$work/site" -name '*.so' -exec strip --strip-unneeded {} +

mkdir -p "$(dirname "$archive")"
tar -C "$work" -cf - . | xz -T2 -6 >"$archive"
du -h "$archive"
