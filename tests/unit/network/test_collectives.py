# SPDX-License-Identifier: Apache-2.0
"""The note that says what a DIST_COLLECTIVE layer does."""

from types import SimpleNamespace

import pytest


def test_round_trip():
    from trtllm_mhc.network.collectives import Collective, label_all_reduce_sum, read_collective

    layer = SimpleNamespace(metadata="")
    label_all_reduce_sum(layer, (2, 3))
    assert read_collective(layer) == Collective("ALL_REDUCE", "SUM", (2, 3))
    assert read_collective(layer).is_all_reduce_sum


@pytest.mark.parametrize("metadata", ["", "[ONNX Layer: sum]", "[1]", '{"trtllm_mhc.collective": {}}', "3"])
def test_anything_else_is_unknown(metadata):
    from trtllm_mhc.network.collectives import read_collective

    assert read_collective(SimpleNamespace(metadata=metadata)) is None


def test_other_collectives_are_no_all_reduce_sum():
    from trtllm_mhc.network.collectives import Collective

    assert not Collective("BROADCAST", "NONE", (0, 1)).is_all_reduce_sum
    assert not Collective("ALL_REDUCE", "MAX", (0, 1)).is_all_reduce_sum


def test_survives_in_a_network(trt, network):
    from trtllm_mhc.network.collectives import label_all_reduce_sum, read_collective

    if not hasattr(network, "add_dist_collective"):
        pytest.skip(f"TensorRT {trt.__version__} has no DIST_COLLECTIVE layer")
    x = network.add_input("x", trt.bfloat16, (-1, 8))
    layer = network.add_dist_collective(x, trt.CollectiveOperation.ALL_REDUCE, trt.ReduceOperation.SUM, -1, [0, 1])
    assert read_collective(network.get_layer(0)) is None
    label_all_reduce_sum(layer, (0, 1))
    assert read_collective(network.get_layer(0)).group == (0, 1)
