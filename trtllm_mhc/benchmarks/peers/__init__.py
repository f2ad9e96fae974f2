# SPDX-License-Identifier: Apache-2.0
"""Other implementations of what this project fuses. Each is optional; what is missing is said by name."""
