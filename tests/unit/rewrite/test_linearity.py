# SPDX-License-Identifier: Apache-2.0
"""Ten times the layers take about ten times as long (`linearity.py` goes on to 4 000)."""

from __future__ import annotations

import pytest

#: A pass that compares each layer with each would be at 10.
_GROWTH = 3.0


@pytest.mark.timeout(300)
def test_network(trt, builder):
    import linearity

    flag = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    flags = 0 if flag is None else 1 << int(flag)
    linearity.time_network(builder, flags, 20)
    small, large = (linearity.time_network(builder, flags, layers) for layers in (20, 200))
    assert large / small / 10 < _GROWTH


@pytest.mark.timeout(300)
def test_onnx(trt):
    pytest.importorskip("onnx_ir")
    import linearity

    linearity.time_onnx(20)
    small, large = (linearity.time_onnx(layers) for layers in (20, 200))
    assert large / small / 10 < _GROWTH
