# SPDX-License-Identifier: Apache-2.0
"""Network definitions of models, and the weights to build them with."""
