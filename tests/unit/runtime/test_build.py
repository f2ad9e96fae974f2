# SPDX-License-Identifier: Apache-2.0
"""What can be tested of building without building."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


def test_row_range_is_checked(trt: Any) -> None:
    from trtllm_mhc.runtime.build import RowRange

    for bad in ((0, 1, 2), (2, 1, 3), (1, 4, 3)):
        with pytest.raises(ValueError, match="minimum <= optimum <= maximum"):
            RowRange(*bad)


def test_profile_covers_every_dynamic_input(trt: Any, network: Any) -> None:
    from trtllm_mhc.runtime.build import RowRange, profile_shapes

    network.add_input("rows", trt.bfloat16, (-1, 4, 8))
    network.add_input("static", trt.float32, (3, 8))
    network.add_input("permuted", trt.float32, (-1, 8))
    given = {"permuted": ((1, 8), (6, 8), (60, 8))}
    assert profile_shapes(network, RowRange(1, 2, 16), given) == {
        "rows": ((1, 4, 8), (2, 4, 8), (16, 4, 8)),
        "permuted": ((1, 8), (6, 8), (60, 8)),
    }
    with pytest.raises(ValueError, match="'rows' has dynamic dimensions"):
        profile_shapes(network, None, given)
    with pytest.raises(ValueError, match=r"no dynamic inputs of the names \['static'\]"):
        profile_shapes(network, RowRange(1, 2, 16), {"static": ((3, 8), (3, 8), (3, 8))})


def test_inner_dynamic_dimensions_need_a_range(trt: Any, network: Any) -> None:
    from trtllm_mhc.runtime.build import RowRange, profile_shapes

    network.add_input("x", trt.float32, (-1, -1))
    with pytest.raises(ValueError, match="'x' has dynamic dimensions"):
        profile_shapes(network, RowRange(1, 2, 4), {})


def test_error_recorder_gives_each_text_once(trt: Any) -> None:
    from trtllm_mhc.runtime.build import ErrorRecorder, explain

    recorder = ErrorRecorder()
    for text in ("first", "second", "first"):
        assert recorder.report_error(trt.ErrorCodeTRT.INVALID_ARGUMENT, text) is False
    assert explain("it failed", recorder) == "it failed\n  TensorRT: first\n  TensorRT: second"
    assert recorder.num_errors() == 0
    assert explain("it failed", recorder) == "it failed\n  TensorRT gave no reason"


def test_what_a_plugin_refused_is_part_of_the_explanation(trt: Any) -> None:
    import numpy as np

    from trtllm_mhc import plugin
    from trtllm_mhc.runtime.build import ErrorRecorder, explain

    values = np.array([3], np.int32)
    fields = trt.PluginFieldCollection([trt.PluginField("tp_size", values, trt.PluginFieldType.INT32)])
    made = plugin.creator("MhcAllReduce").create_plugin("x", fields, trt.TensorRTPhase.BUILD)
    assert made is None
    assert "plugin: MhcAllReduce" in explain("it failed", ErrorRecorder())


def test_errors_of_tensorrt_reach_the_recorder(trt: Any, builder: Any) -> None:
    from trtllm_mhc.runtime import build

    recorder = build.ErrorRecorder()
    network = build.make_network(build.make_builder(recorder))
    x = network.add_input("x", trt.bfloat16, (2, 8))
    y = network.add_input("y", trt.float32, (2, 8))
    total = network.add_elementwise(x, y, trt.ElementWiseOperation.SUM)
    network.mark_output(total.get_output(0))
    made = build.make_builder(recorder)
    assert made.build_serialized_network(network, made.create_builder_config()) is None
    assert any("TensorRT: " in line for line in build.explain("no engine", recorder).splitlines())


def test_timing_caches_are_kept(builder: Any, tmp_path: Path) -> None:
    from trtllm_mhc.runtime.build import TimingCache

    path = tmp_path / "caches" / "timing.cache"
    cache = TimingCache(path)
    assert cache.data == b""
    for _ in range(2):
        config = builder.create_builder_config()
        cache.keep(cache.attach(config))
    assert cache.data
    assert TimingCache(path).data == cache.data
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_an_unusable_timing_cache_counts_as_empty(builder: Any, tmp_path: Path) -> None:
    from trtllm_mhc.runtime.build import TimingCache

    path = tmp_path / "timing.cache"
    path.write_bytes(b"not a timing cache" * 20)
    config = builder.create_builder_config()
    cache = TimingCache(path)
    cache.keep(cache.attach(config))
    empty = TimingCache()
    empty.keep(empty.attach(config))
    assert path.read_bytes() == empty.data


def test_without_a_gpu_nothing_is_built(trt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from trtllm_mhc.runtime import build

    monkeypatch.setattr(build.cuda, "device_count", lambda: 0)
    with pytest.raises(build.EngineError, match="needs a CUDA device"):
        build.build_engine(lambda network: None)
    reason = build.why_no_engines()
    assert reason is not None
    assert "needs a CUDA device" in reason
