#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
#   tests/multi_gpu/run.sh [FOLDER]     every test of tests/gpu and tests/multi_gpu with a GPU for each rank, graphs
#                                       replayed 10 000 times, and the times on both sides of NCCL's threshold
#
# For a machine with at least two GPUs; what there are too few GPUs for is skipped with the reason. Results go to FOLDER
# (tests/multi_gpu/results).
set -euo pipefail
cd "$(dirname "$0")/../.."
results=$(realpath -m "${1:-tests/multi_gpu/results}")
python=$([ -x .venv/bin/python ] && echo .venv/bin/python || command -v python3)
mkdir -p "$results"
# Without NVLink multicast, which some machines do not allow.
export NCCL_NVLS_ENABLE=0 CUDA_DEVICE_MAX_CONNECTIONS=32 MHC_TEST_REPLAYS=${MHC_TEST_REPLAYS:-10000}
export TRTLLM_MHC_RESULTS=$results
status=0
"$python" -m pytest tests/gpu tests/multi_gpu --timeout 600 || status=$?
"$python" -m tests.multi_gpu.threshold --json "$results/threshold.jsonl" || status=$?
exit $status
