# SPDX-License-Identifier: Apache-2.0
import numpy as np
import tensorrt as trt

np_bfloat16 = np.dtype("V2", metadata={"dtype": "bfloat16"})
_TYPES = {
    "bfloat16": (np_bfloat16, trt.bfloat16),
    "float32": (np.dtype(np.float32), trt.float32),
    "int32": (np.dtype(np.int32), trt.int32),
}


def str_dtype_to_np(dtype):
    return _TYPES[dtype][0]


def str_dtype_to_trt(dtype):
    return _TYPES[dtype][1]


def np_dtype_to_trt(dtype):
    return next(theirs for ours, theirs in _TYPES.values() if ours == dtype)
