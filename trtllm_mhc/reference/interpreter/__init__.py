# SPDX-License-Identifier: Apache-2.0
"""A numpy interpreter of TensorRT network definitions, several ranks in lockstep.

It says what a network computes without building it: of the rewrite pass, that it changes nothing, and of an engine,
with ``precision="float64"``, how far its rounding has taken it.
"""

from .arithmetic import Precision
from .lockstep import LockstepError, evaluate

__all__ = ["LockstepError", "Precision", "evaluate"]
