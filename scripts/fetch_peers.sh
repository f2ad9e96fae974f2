#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
#   fetch_peers.sh FOLDER PYTHON     gets what `trtllm-mhc bench --peers FOLDER` measures us against
#
# sglang's kernels come from its wheel and are compiled for sm_90a; benchmarks/peers/sglang.cu calls them. One library for
# each number of ranks. The compiler is NVCC, else nvcc in the PATH, else the one in PYTHON's packages. About 15 s each.
set -euo pipefail

folder=${1:?usage: fetch_peers.sh FOLDER PYTHON}
python=${2:?usage: fetch_peers.sh FOLDER PYTHON}
sglang=0.5.23 tvm_ffi=0.1.12
here=$(cd "$(dirname "$0")/.." && pwd)
stamp="sglang $sglang, tvm-ffi $tvm_ffi, $(sha256sum <"$here/benchmarks/peers/sglang.cu" | cut -c1-12)"

if [ "$(cat "$folder/.version" 2>/dev/null)" = "$stamp" ]; then
    exit 0
fi
nvcc=${NVCC:-$(command -v nvcc || "$python" - <<'PY'
import importlib.util
import pathlib

spec = importlib.util.find_spec("nvidia")
for parent in spec.submodule_search_locations if spec else []:
    for found in pathlib.Path(parent).glob("cu1*/bin/nvcc"):
        print(found)
PY
)}
[ -x "$nvcc" ] || { echo "fetch_peers.sh: no nvcc: set NVCC, or install a CUDA toolkit" >&2; exit 1; }
root=$(dirname "$(dirname "$(readlink -f "$nvcc")")")

rm -rf "$folder"
mkdir -p "$folder/wheels"
echo "Fetching sglang $sglang and tvm-ffi $tvm_ffi"
"$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12 \
    --platform manylinux_2_34_x86_64 --platform manylinux_2_28_x86_64 --dest "$folder/wheels" \
    "sglang==$sglang" "apache-tvm-ffi==$tvm_ffi"
"$python" - "$folder" <<'PY'
import pathlib
import sys
import zipfile

folder = pathlib.Path(sys.argv[1])
for wheel, wanted in (("sglang", "sglang/kernels/"), ("apache_tvm_ffi", "tvm_ffi/")):
    (path,) = folder.glob(f"wheels/{wheel}-*.whl")
    with zipfile.ZipFile(path) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if name.startswith(wanted)])
PY
cp "$folder/tvm_ffi/lib/libtvm_ffi.so" "$folder/"
kernels=$folder/sglang/kernels/jit
for ranks in 2 4 8; do
    echo "Compiling sglang's kernels for $ranks ranks"
    "$nvcc" -w -O3 -std=c++20 --expt-relaxed-constexpr -gencode=arch=compute_90a,code=sm_90a -DSGL_CUDA_ARCH=900 \
        -DMHC_PEER_RANKS="$ranks" -I"$kernels/include" -I"$kernels/csrc" -I"$folder/tvm_ffi/include" \
        -Xcompiler -fPIC,-fvisibility=hidden -shared -cudart static -L"$root/lib" -L"$root/lib64" \
        -o "$folder/libsglang_tp$ranks.so" "$here/benchmarks/peers/sglang.cu" \
        -L"$folder" -ltvm_ffi -Xlinker '-rpath=$ORIGIN'
done
# Triton's kernels of the unfused chain are Python: they are imported from here, without the package around them.
install -D -m 644 -t "$folder/triton/sglang/kernels/ops/layernorm" \
    "$folder/sglang/kernels/ops/layernorm/"{hc_combine_norm,mhc_post_split_h}.py
install -D -m 644 -t "$folder/triton/sglang/kernels/ops/quantization" "$folder/sglang/kernels/ops/quantization/mxfp8_epilogue.py"
rm -rf "$folder/wheels" "$folder/sglang" "$folder/tvm_ffi"
echo "$stamp" >"$folder/.version"
