# SPDX-License-Identifier: Apache-2.0
"""The command `trtllm-mhc`."""

from __future__ import annotations


def main() -> None:
    """Entry point of the console script."""
    from trtllm_mhc.cli.app import app

    app()
