# SPDX-License-Identifier: Apache-2.0
"""Comparing fused with unfused networks: what to look at (`probes`) and how to judge it (`checks`)."""
