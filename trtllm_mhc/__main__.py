# SPDX-License-Identifier: Apache-2.0
"""`python -m trtllm_mhc` is the command `trtllm-mhc`."""

from trtllm_mhc.cli import main

main()
