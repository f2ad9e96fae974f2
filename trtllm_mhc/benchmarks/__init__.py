# SPDX-License-Identifier: Apache-2.0
"""Measurements of the operations, and of other implementations of them."""
