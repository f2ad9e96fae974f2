# SPDX-License-Identifier: Apache-2.0
"""The all-reduce and mHC boundary of DeepSeek V4.1 as one TensorRT plugin, and the pass that puts it into a network."""

__version__ = "0.1.0"
