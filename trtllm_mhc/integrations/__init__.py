# SPDX-License-Identifier: Apache-2.0
"""The places where engines are used: one package for each tool."""
