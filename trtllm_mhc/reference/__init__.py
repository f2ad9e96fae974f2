# SPDX-License-Identifier: Apache-2.0
"""The numpy reference of every operation.

`operations`, `mxfp8` and `coefficients` define the results bit for bit; `publish_linear` says how far sums on tensor
cores may be off; `float64` evaluates the same formulae without any intermediate rounding; `compare` says what counts as
equal.
"""

from . import float64
from .coefficients import Coefficients, broadcast_projection, coefficients_float32, coefficients_float64
from .compare import (
    ErrorRatio,
    agreement_factor,
    assert_bits_equal,
    bits_equal,
    collapse_magnitude,
    error_ratio,
    mean_square_error,
    norm_interval,
    norms_agree,
    stream_magnitude,
    sums_agree,
    ulp_distance,
)
from .floats import fma, round_bf16, rsqrt, widen
from .mxfp8 import dequantize, quantize, scale_bytes, swizzle_scales, unswizzle_scales
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
from .publish_linear import (
    dequantize_weight,
    pack_weight_scales,
    publish_linear,
    publish_linear_agrees,
    publish_linear_float64,
    unpack_weight_scales,
)

__all__ = [
    "Coefficients",
    "ErrorRatio",
    "agreement_factor",
    "all_reduce",
    "assert_bits_equal",
    "aux_mean",
    "bits_equal",
    "boundary",
    "broadcast_projection",
    "clear_negative_zero",
    "coefficients_float32",
    "coefficients_float64",
    "collapse",
    "collapse_magnitude",
    "dequantize",
    "dequantize_weight",
    "error_ratio",
    "finalize",
    "float64",
    "fma",
    "inverse_rms",
    "mean_square_error",
    "mhc_post",
    "norm_interval",
    "norms_agree",
    "pack_weight_scales",
    "publish_linear",
    "publish_linear_agrees",
    "publish_linear_float64",
    "quantize",
    "rms_norm",
    "round_bf16",
    "rows_with_bad_index",
    "rsqrt",
    "scale_bytes",
    "stream_magnitude",
    "sums_agree",
    "swizzle_scales",
    "ulp_distance",
    "unpack_weight_scales",
    "unswizzle_scales",
    "widen",
]
