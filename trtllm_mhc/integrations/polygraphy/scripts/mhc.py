# SPDX-License-Identifier: Apache-2.0
"""Scripts for Polygraphy's command line; docs/polygraphy.md shows them at work.

    MHC=$(python -c "from trtllm_mhc.integrations.polygraphy import SCRIPTS; print(SCRIPTS)")

    $MHC:load_stack     a network (--model-type trt-network-script): DeepSeek V4.1's boundary stack, unfused
    $MHC:load_data      --data-loader-script: inputs for it
    $MHC:fuse           --trt-network-postprocess-script: the rewrite pass, on any network; also named postprocess
    $MHC:float32_io     --trt-network-postprocess-script: fp32 in place of bf16 at the network's edge

Polygraphy calls them without arguments: what they make is chosen by the environment variables of
`trtllm_mhc.integrations.polygraphy.settings.Settings`.
"""

from trtllm_mhc.integrations.polygraphy.command_line import fuse, load_data, load_network, load_stack, postprocess
from trtllm_mhc.integrations.polygraphy.network import float32_io

__all__ = ["float32_io", "fuse", "load_data", "load_network", "load_stack", "postprocess"]
