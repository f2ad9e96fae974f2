# SPDX-License-Identifier: Apache-2.0
import numpy as np

from ._common import default_net
from ._utils import np_dtype_to_trt, str_dtype_to_trt
from .functional import constant


class Parameter:
    def __init__(self, value=None, shape=None, dtype=None, is_buffer=False, prefer_managed=False):
        self._shape = tuple(shape if value is None else value.shape)
        self._dtype = str_dtype_to_trt(dtype) if isinstance(dtype, str) else dtype
        self._value = value
        self._tensor = None

    @property
    def shape(self):
        return self._shape

    @property
    def dtype(self):
        return self._dtype

    def is_inited(self):
        return self._value is not None

    @property
    def raw_value(self):
        # The original fills a parameter that has no value with random numbers, on the GPU.
        assert isinstance(self._value, np.ndarray), "raw_value must be read before value"
        return self._value

    @property
    def value(self):
        return self.get_constant_tensor(default_net())

    @value.setter
    def value(self, v):
        assert isinstance(v, np.ndarray), f"expected an array, got {type(v)}"
        assert v.shape == self._shape, f"expected shape {self._shape}, got {v.shape}"
        assert np_dtype_to_trt(v.dtype) == self._dtype, f"expected {self._dtype}, got {v.dtype}"
        self._value = v

    def get_constant_tensor(self, network):
        if self._tensor is None:
            self._value = self._tensor = constant(self._value)
        return self._tensor
