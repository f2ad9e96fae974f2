#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
#   run.sh [OPTIONS]     fetches what is missing, builds, and runs deploy.py with OPTIONS (--help lists them)
#
# TENSORRT=11.2 chooses the TensorRT; "installed" is the environment's own.
set -euo pipefail
cd "$(dirname "$0")/../.."
tensorrt=${TENSORRT:-$([ -e /dev/nvidiactl ] && echo 10.6 || echo 11.2)}
make --no-print-directory build triton
make --no-print-directory tensorrt VERSIONS="$tensorrt"
python=.venv/bin/python
if [ "$tensorrt" = installed ]; then
    python=$(command -v python3)
fi
exec scripts/with_tensorrt.sh "$tensorrt" "$python" examples/triton_deployment/deploy.py "$@"
