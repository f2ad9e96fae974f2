# SPDX-License-Identifier: Apache-2.0
"""Downcasting of the layers that a network hands out."""

import ml_dtypes
import numpy as np
import pytest


def test_every_layer_type_has_a_class(trt):
    from trtllm_mhc.network.layers import _layer_classes

    # PLUGIN is the type of the layer class that TensorRT 8 removed.
    assert set(trt.LayerType.__members__.values()) - set(_layer_classes()) == {trt.LayerType.PLUGIN}


def test_classes_are_distinct(trt):
    from trtllm_mhc.network.layers import _layer_classes

    classes = list(_layer_classes().values())
    assert len(set(classes)) == len(classes)


def test_downcast_reveals_attributes(trt, network):
    from trtllm_mhc.network.layers import downcast

    x = network.add_input("x", trt.float32, (2, 3))
    network.add_elementwise(x, x, trt.ElementWiseOperation.PROD)
    network.add_reduce(x, trt.ReduceOperation.MAX, 2, True)
    network.add_matrix_multiply(x, trt.MatrixOperation.NONE, x, trt.MatrixOperation.TRANSPOSE)

    elementwise, reduce, matmul = (downcast(network.get_layer(i)) for i in range(3))
    assert elementwise.op == trt.ElementWiseOperation.PROD
    assert (reduce.op, reduce.axes, reduce.keep_dims) == (trt.ReduceOperation.MAX, 2, True)
    assert (matmul.op0, matmul.op1) == (trt.MatrixOperation.NONE, trt.MatrixOperation.TRANSPOSE)


def test_downcast_keeps_identity_and_typed_layers(trt, network):
    from trtllm_mhc.network.layers import downcast

    x = network.add_input("x", trt.float32, (2, 3))
    added = network.add_unary(x, trt.UnaryOperation.EXP)
    assert downcast(added) is added
    base = network.get_layer(0)
    assert downcast(base) is base
    assert type(base) is trt.IUnaryLayer
    assert type(downcast(base)) is trt.IUnaryLayer


def test_layer_type_of_a_layer_that_hides_it(trt, network):
    from trtllm_mhc.network.layers import downcast, layer_type

    x = network.add_input("x", trt.float32, (2, 3))
    network.add_activation(x, trt.ActivationType.TANH)
    base = network.get_layer(0)
    assert layer_type(base) == trt.LayerType.ACTIVATION
    assert downcast(base).type == trt.ActivationType.TANH
    assert layer_type(base) == trt.LayerType.ACTIVATION
    assert type(downcast(base)) is trt.IActivationLayer


def _constant_values(dtype):
    if dtype == np.bool_:
        return np.array([[True, False, True], [True, True, False]])
    return np.array([[1, 2, 3], [4, 5, 6]]).astype(dtype)


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "fp8", "int8", "int32", "int64", "bool"])
def test_constant_array_reads_every_dtype(trt, network, name):
    from trtllm_mhc.network.layers import constant_array, numpy_dtype

    trt_dtype = getattr(trt, name)
    values = _constant_values(numpy_dtype(trt_dtype))
    network.add_constant((2, 3), trt.Weights(trt_dtype, values.ctypes.data, values.size))

    read = constant_array(network.get_layer(0))
    assert read.dtype == values.dtype
    np.testing.assert_array_equal(read.astype(np.float64), values.astype(np.float64))


def test_constant_array_copies_unless_asked_for_a_view(trt, network):
    from trtllm_mhc.network.layers import constant_array

    values = np.array([1, 2, 3], ml_dtypes.bfloat16)
    layer = network.add_constant((3,), trt.Weights(trt.bfloat16, values.ctypes.data, 3))
    copied, view = constant_array(layer), constant_array(layer, copy=False)
    values[0] = 7
    assert float(copied[0]) == 1
    assert float(view[0]) == 7
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 0


def test_constant_array_of_a_scalar(trt, network):
    from trtllm_mhc.network.layers import constant_array

    scalar = network.add_constant((), np.array([2.5], np.float32))
    assert constant_array(scalar).shape == ()
    assert constant_array(scalar) == np.float32(2.5)


def test_numpy_dtype_refuses_packed_types(trt):
    from trtllm_mhc.network.layers import numpy_dtype

    with pytest.raises(NotImplementedError, match="INT4"):
        numpy_dtype(trt.int4)


def test_tensor_shape(trt, network):
    from trtllm_mhc.network.layers import tensor_shape

    x = network.add_input("x", trt.float32, (-1, 3))
    assert tensor_shape(x) == (-1, 3)
    y = network.add_input("y", trt.float32, (2, 4))
    impossible = network.add_elementwise(x, y, trt.ElementWiseOperation.SUM).get_output(0)
    assert tensor_shape(impossible) is None
