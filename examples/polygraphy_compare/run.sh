#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Compares the unfused with the fused form of DeepSeek V4.1's boundary stack, in two ways:
#
#   1. trtllm-mhc verify: every rank, Polygraphy's comparison and more
#   2. plain polygraphy calls, to be copied: one rank
#
#   run.sh [FOLDER]     FOLDER: where engines, outputs and records go; default: polygraphy_compare_out
#   LAYERS=40 TP=4      a larger stack (default 4 layers), more ranks (default 2)
#
# With a GPU both run engines. Without one verify evaluates both networks by the numpy interpreter, and polygraphy shows
# the network before and after the pass.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)

# An environment that has everything is used as it is; otherwise the one that `make build tensorrt` has made.
if ! python -c 'import polygraphy, tensorrt, trtllm_mhc' 2>/dev/null && [ -z "${COMPARE_IN_VENV:-}" ]; then
    version=$([ -e /dev/nvidiactl ] && echo 10.6 || echo 11.2)
    if [ ! -x "$root/.venv/bin/trtllm-mhc" ] || [ ! -d "$root/.trt/$version" ]; then
        make -C "$root" --no-print-directory build
        make -C "$root" --no-print-directory tensorrt VERSIONS="$version"
    fi
    COMPARE_IN_VENV=1 PATH=$root/.venv/bin:$PATH exec "$root/scripts/with_tensorrt.sh" "$version" bash "$0" "$@"
fi

out=${1:-polygraphy_compare_out}
mkdir -p "$out"
scripts=$(python -c 'from trtllm_mhc.integrations.polygraphy import SCRIPTS; print(SCRIPTS)')
library=$(python -c 'from trtllm_mhc.plugin import library_path; print(library_path())')
tp=${TP:-2}

if [ ! -e /dev/nvidiactl ]; then
    layers=${LAYERS:-1}
    set -x
    trtllm-mhc verify --tp "$tp" --layers "$layers" --sublayers none --rows 2 --inputs 2 --json "$out/verify.json"

    export MHC_STACK_TP=$tp MHC_STACK_LAYERS=$layers MHC_STACK_SUBLAYERS=none
    polygraphy inspect model "$scripts:load_stack" --model-type trt-network-script --plugins "$library" \
        --show layers >"$out/unfused.txt"
    polygraphy inspect model "$scripts:load_stack" --model-type trt-network-script --plugins "$library" \
        --trt-network-postprocess-script "$scripts:fuse" --show layers >"$out/fused.txt"
    { set +x; } 2>/dev/null
    grep 'boundaries fused' "$out/fused.txt"
    exit 0
fi

export MHC_STACK_LAYERS=${LAYERS:-4} MHC_STACK_IO=float32 MHC_STACK_ROWS=8
export CUDA_DEVICE_MAX_CONNECTIONS=32
shapes=(--trt-min-shapes "embeddings:[1,5120]" --trt-opt-shapes "embeddings:[8,5120]" --trt-max-shapes "embeddings:[8,5120]")
set -x

# 1. Every rank: built, run in lockstep, compared; then the same engines from their files.
trtllm-mhc verify --tp "$tp" --layers "$MHC_STACK_LAYERS" --rows 8 --save-engines "$out/engines" --json "$out/verify.json"
trtllm-mhc verify --tp "$tp" --rows 8 --unfused "$out/engines/unfused" --fused "$out/engines/fused" \
    --json "$out/verify_engines.json"

# 2. One rank, by Polygraphy alone: the unfused form, then the same network after the pass, compared with it.
polygraphy run "$scripts:load_stack" --model-type trt-network-script --trt --plugins "$library" "${shapes[@]}" \
    --data-loader-script "$scripts" --save-outputs "$out/unfused.json"
polygraphy run "$scripts:load_stack" --model-type trt-network-script --trt --plugins "$library" "${shapes[@]}" \
    --trt-network-postprocess-script "$scripts:fuse" \
    --data-loader-script "$scripts" --load-outputs "$out/unfused.json" --atol 0.1 --rtol 0 \
    --save-engine "$out/fused.engine"

# The engine that came of it, without the network.
polygraphy run "$out/fused.engine" --model-type engine --trt --plugins "$library" \
    --data-loader-script "$scripts" --load-outputs "$out/unfused.json" --atol 0.1 --rtol 0
polygraphy inspect model "$out/fused.engine" --model-type engine --plugins "$library"
