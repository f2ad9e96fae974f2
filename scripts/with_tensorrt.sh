#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
#   with_tensorrt.sh VERSION COMMAND...       runs COMMAND with the TensorRT that fetch_tensorrt.sh put into .trt/VERSION
#   with_tensorrt.sh installed COMMAND...     runs COMMAND with the TensorRT of its own environment
#
# Without a GPU, TensorRT's CPU-only mode is switched on: networks can be made, engines cannot.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)

version=${1:?usage: with_tensorrt.sh VERSION COMMAND...}
shift
if [ "$version" != installed ]; then
    trt=$root/.trt/$version
    if [ ! -d "$trt/lib" ] || [ ! -d "$trt/python" ]; then
        echo "with_tensorrt.sh: no TensorRT $version in $trt; run scripts/fetch_tensorrt.sh $version" >&2
        exit 1
    fi
    export LD_LIBRARY_PATH=$trt/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    export PYTHONPATH=$trt/python${PYTHONPATH:+:$PYTHONPATH}
fi
if [ ! -e /dev/nvidiactl ]; then
    export TRT_INTERNAL_OPTIONS=${TRT_INTERNAL_OPTIONS:---cpu_only=1}
fi
exec "$@"
