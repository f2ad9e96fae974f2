# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the rewrite pass's tests."""

from __future__ import annotations

import pytest


@pytest.fixture
def parse(trt, builder):
    """What TensorRT's parser makes of a model or of a file."""

    def parse(model):
        flags = 0
        if hasattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED"):
            flags = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
        network = builder.create_network(flags)
        parser = trt.OnnxParser(network, builder.logger)
        if hasattr(model, "SerializeToString"):
            parsed = parser.parse(model.SerializeToString())
        else:
            parsed = parser.parse_from_file(str(model))
        assert parsed, [parser.get_error(k).desc() for k in range(parser.num_errors)]
        return network

    return parse
