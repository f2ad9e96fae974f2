# SPDX-License-Identifier: Apache-2.0
"""Downcasting of the layers that a network hands out."""

import pytest

pytestmark = pytest.mark.tensorrt


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
