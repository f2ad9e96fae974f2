# SPDX-License-Identifier: Apache-2.0
"""The numpy reference of every operation.

`operations`, `mxfp8` and `coefficients` define the results bit for bit; `float64` evaluates the same formulae without
any intermediate rounding; `compare` says what counts as equal.
"""

from . import float64
from .compare import (
    ErrorRatio,
    agreement_factor,
    assert_bits_equal,
    bits_equal,
    collapse_magnitude,
    error_ratio,
    mean_square_error,
    stream_magnitude,
    sums_agree,
    ulp_distance,
)
from .floats import fma, round_bf16, rsqrt, widen
from .operations import (
    all_reduce,
    aux_mean,
    boundary,
    clear_negative_zero,
    collapse,
    finalize,
    inverse_rms,
    mhc_post,
    rms_norm,
    rows_with_bad_index,
)

__all__ = [
    "ErrorRatio",
    "agreement_factor",
    "all_reduce",
    "assert_bits_equal",
    "aux_mean",
    "bits_equal",
    "boundary",
    "clear_negative_zero",
    "collapse",
    "collapse_magnitude",
    "error_ratio",
    "finalize",
    "float64",
    "fma",
    "inverse_rms",
    "mean_square_error",
    "mhc_post",
    "rms_norm",
    "round_bf16",
    "rows_with_bad_index",
    "rsqrt",
    "stream_magnitude",
    "sums_agree",
    "ulp_distance",
    "widen",
]
