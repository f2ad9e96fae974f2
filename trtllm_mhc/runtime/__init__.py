# SPDX-License-Identifier: Apache-2.0
"""Running engines: communicators, device memory, graphs and groups of ranks."""
