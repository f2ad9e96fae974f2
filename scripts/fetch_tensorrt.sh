#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Fetches a TensorRT for building, tests and the demo. Users who have TensorRT installed do not need it.
#
#   fetch_tensorrt.sh 10.6|10.15|11.2 [DEST] [PYTHON]    libraries, Python bindings and headers
#   fetch_tensorrt.sh headers         [DEST] [PYTHON]    headers only
#
# DEST    default .trt/VERSION; gets lib/, python/ and include/. scripts/with_tensorrt.sh runs commands with them.
# PYTHON  the interpreter that will import the bindings; default .venv's, else python3.
#
# Parts that are there already are kept. Libraries come from Maven Central, bindings and headers from PyPI, without the
# packages that those wheels depend on. Needs Maven (not for headers) and pip. A TensorRT takes 1 to 1.7 GB on disk.
set -euo pipefail
cd "$(dirname "$0")/.."

die() { echo "fetch_tensorrt.sh: $*" >&2; exit 1; }

version=${1:-}
case $version in
    10.6)    artifact=10.6-1.5.11  bindings=tensorrt-cu12-bindings==10.6.0 ;;
    10.15)   artifact=10.15-1.5.13 bindings=tensorrt-cu13-bindings==10.15.1.29 ;;
    11.2)    artifact=11.2-1.5.14  bindings=tensorrt-cu13-bindings==11.2.1.2 ;;
    headers) artifact='' bindings='' ;;
    *) die "expected one of 10.6, 10.15, 11.2, headers; got '$version'" ;;
esac
# Headers of TensorRT 10.14, published under Apache-2.0. Plugins compiled with them run on every TensorRT 10 and 11.
headers=kernel-lens==2.0.1

dest=${2:-.trt/$version}
python=${3:-}
if [ -z "$python" ]; then
    python=python3
    if [ -x .venv/bin/python ]; then python=.venv/bin/python; fi
fi
"$python" -m pip --version >/dev/null 2>&1 || die "'$python' has no pip; name another interpreter as third argument"
if [ -n "$artifact" ]; then
    command -v mvn >/dev/null || die "needs Maven: apt-get install maven"
fi

mkdir -p "$dest"
exec 9>"$dest/.lock"
flock -w 1800 9 || die "another process has been fetching into $dest for 30 minutes"
work=$(mktemp -d "$dest/.partial.XXXXXX")
trap 'rm -rf "$work"' EXIT

# download REQUIREMENT: prints the path of its wheel
download() {
    "$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
        --dest "$work/wheels" "$1" >&2 || die "pip could not download $1 for $("$python" --version)"
    echo "$work"/wheels/*.whl
}

# extract ARCHIVE PREFIX FOLDER [flat]: the archive's files under PREFIX, into FOLDER
extract() {
    "$python" - "$@" <<'PY'
import pathlib, shutil, sys, zipfile
archive, prefix, folder, *flat = sys.argv[1:]
with zipfile.ZipFile(archive) as source:
    names = [name for name in source.namelist() if name.startswith(prefix) and not name.endswith("/")]
    if not names:
        sys.exit(f"fetch_tensorrt.sh: {archive} has no {prefix}")
    for name in names:
        path = pathlib.PurePosixPath(name)
        target = pathlib.Path(folder, path.name if flat else path)
        target.parent.mkdir(parents=True, exist_ok=True)
        with source.open(name) as reader, target.open("wb") as writer:
            shutil.copyfileobj(reader, writer, 1 << 20)
PY
}

# install PART MARK: moves the finished part into place; MARK says what it is, for the next call
install() {
    rm -rf "${dest:?}/$1"
    mv "$work/$1" "$dest/$1"
    echo "$2" >"$dest/.$1"
}

# present PART MARK
present() { [ "$(cat "$dest/.$1" 2>/dev/null)" = "$2" ]; }

if ! present include "$headers"; then
    wheel=$(download "$headers")
    extract "$wheel" kernel_lens/include/tensorrt/ "$work/include" flat
    rm -rf "$work/wheels"
    install include "$headers"
fi
[ "$version" = headers ] && exit

if ! present lib "$artifact"; then
    echo "Fetching the libraries of TensorRT $version (0.5 to 1 GB)"
    mvn --batch-mode --quiet -Dstyle.color=never org.apache.maven.plugins:maven-dependency-plugin:3.6.1:copy \
        -Dartifact="org.bytedeco:tensorrt:$artifact:jar:linux-x86_64-redist" -DoutputDirectory="$PWD/${work#"$PWD"/}" \
        || die "Maven could not download org.bytedeco:tensorrt:$artifact"
    extract "$work"/tensorrt-*.jar org/bytedeco/tensorrt/linux-x86_64/lib "$work/lib" flat
    for library in "$work"/lib/*.so.*; do
        name=$(basename "$library")
        ln -s "$name" "$work/lib/${name%%.so.*}.so"
    done
    # 11.2 looks for the builder resources of the device's architecture; only the portable ones are published here.
    portable=$(cd "$work/lib" && ls libnvinfer_builder_resource_ptx.so.* 2>/dev/null || true)
    if [ -n "$portable" ]; then ln -s "$portable" "$work/lib/${portable/_ptx/_sm90}"; fi
    install lib "$artifact"
fi

python_tag=$("$python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
if ! present python "$bindings $python_tag"; then
    wheel=$(download "$bindings")
    extract "$wheel" tensorrt_bindings/ "$work/python"
    # NVIDIA's own `tensorrt` package would pull in its library wheels; this one only gives the bindings their usual name.
    mkdir "$work/python/tensorrt"
    cat >"$work/python/tensorrt/__init__.py" <<'PY'
"""TensorRT's Python bindings under their usual name; the libraries come from LD_LIBRARY_PATH."""

import sys

import tensorrt_bindings

for _name, _module in list(sys.modules.items()):
    if _name.startswith("tensorrt_bindings."):
        sys.modules["tensorrt" + _name.removeprefix("tensorrt_bindings")] = _module
globals().update({k: v for k, v in vars(tensorrt_bindings).items() if k == "__version__" or not k.startswith("__")})
PY
    install python "$bindings $python_tag"
fi
echo "TensorRT $version is in $dest"
