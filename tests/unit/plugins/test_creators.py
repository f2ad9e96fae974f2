# SPDX-License-Identifier: Apache-2.0
"""Creators and plugin objects through the registry: the one part that every TensorRT has without a GPU."""

from __future__ import annotations

import itertools
import threading
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from trtllm_mhc import plugin
from trtllm_mhc.plugin_control import PluginError, take_error, warmup

pytestmark = pytest.mark.usefixtures("trt")

BOUNDARY_FIELDS = ("tp_size", "rank", "group", "hc_mult", "norm_eps", "collapse", "published", "top_k", "quantize")
PLAIN = {"tp_size": 2, "norm_eps": 1e-20}
MIXES = {"rms_norm_eps": 1e-20, "hc_eps": 1e-6, "post_alpha": 2.0, "sinkhorn_iters": 20}


def create(name: str, attributes: dict[str, Any], phase: Any = None) -> Any:
    from trtllm_mhc.network.plugins import create_plugin

    return create_plugin(name, attributes, phase=phase)


def raw_create(trt: ModuleType, name: str, *fields: tuple[str, np.ndarray, str]) -> Any:
    """Fields of any type and length, past the checks of create_plugin."""
    made = [trt.PluginField(key, value, getattr(trt.PluginFieldType, kind)) for key, value, kind in fields]
    return plugin.creator(name).create_plugin(name, trt.PluginFieldCollection(made), trt.TensorRTPhase.BUILD)


def build_capability(trt: ModuleType, made: Any) -> Any:
    return made.get_capability_interface(trt.PluginCapabilityType.BUILD)


def test_creators_declare_their_fields(trt: ModuleType) -> None:
    boundary = plugin.creator("MhcBoundary")
    assert (boundary.plugin_namespace, boundary.plugin_version) == ("trtllm_mhc", "1")
    assert [field.name for field in boundary.field_names] == ["format", *BOUNDARY_FIELDS]
    types = {field.name: field.type for field in boundary.field_names}
    assert types.pop("norm_eps") == trt.PluginFieldType.FLOAT32
    assert set(types.values()) == {trt.PluginFieldType.INT32}

    all_reduce = plugin.creator("MhcAllReduce")
    assert [field.name for field in all_reduce.field_names] == ["format", "tp_size", "rank", "group", "strategy"]

    publish_linear = plugin.creator("MhcPublishLinear")
    names = [field.name for field in publish_linear.field_names]
    assert names == ["format", "tp_size", "rank", "group", "weight_type"]
    assert {field.type for field in publish_linear.field_names} == {trt.PluginFieldType.INT32}

    coefficients = plugin.creator("MhcCoefficients")
    types = {field.name: field.type for field in coefficients.field_names}
    assert list(types) == ["format", "hc_mult", *MIXES, "broadcast"]
    reals = {name for name, kind in types.items() if kind == trt.PluginFieldType.FLOAT32}
    assert reals == {"rms_norm_eps", "hc_eps", "post_alpha"}
    assert {types[name] for name in types.keys() - reals} == {trt.PluginFieldType.INT32}


@pytest.mark.parametrize("phase", ["BUILD", "RUNTIME"])
@pytest.mark.parametrize(
    ("name", "attributes", "outputs"),
    [
        ("MhcBoundary", PLAIN, 2),
        ("MhcBoundary", PLAIN | {"format": 1, "hc_mult": 4, "rank": 1, "group": (3, 9)}, 2),
        ("MhcBoundary", {"tp_size": 8, "collapse": 0}, 1),
        ("MhcBoundary", PLAIN | {"norm_eps": 0.0, "quantize": 1}, 4),
        ("MhcBoundary", PLAIN | {"top_k": 6}, 2),
        ("MhcBoundary", PLAIN | {"published": 1}, 2),
        ("MhcAllReduce", {"tp_size": 1}, 1),
        ("MhcAllReduce", {"tp_size": 4, "strategy": "oneshot"}, 1),
        ("MhcAllReduce", {"tp_size": 4, "strategy": "nccl"}, 1),
        ("MhcPublishLinear", {"tp_size": 8}, 1),
        ("MhcPublishLinear", {"tp_size": 2, "weight_type": 1, "format": 1, "rank": 1, "group": (3, 9)}, 1),
        ("MhcCoefficients", MIXES, 3),
        ("MhcCoefficients", MIXES | {"format": 1, "hc_mult": 4, "broadcast": 1, "sinkhorn_iters": 1}, 3),
        ("MhcCoefficients", MIXES | {"rms_norm_eps": 0.0, "hc_eps": 0.0, "post_alpha": -1.0}, 3),
    ],
)
def test_good_fields_make_a_plugin(
    trt: ModuleType, name: str, attributes: dict[str, Any], outputs: int, phase: str
) -> None:
    made = create(name, attributes, getattr(trt.TensorRTPhase, phase))
    core = made.get_capability_interface(trt.PluginCapabilityType.CORE)
    assert (core.plugin_name, core.plugin_namespace, core.plugin_version) == (name, "trtllm_mhc", "1")
    assert build_capability(trt, made).num_outputs == outputs
    assert take_error(any_thread=True) is None


@pytest.mark.parametrize(
    ("name", "attributes", "message"),
    [
        ("MhcBoundary", {}, r'MhcBoundary: field "tp_size" is required \(INT32, 1, 2, 4 or 8\), but missing'),
        ("MhcBoundary", {"tp_size": 2}, r'field "norm_eps" is required \(FLOAT32, .*\) with collapse=1, but missing'),
        ("MhcBoundary", PLAIN | {"tp_size": 3}, r'field "tp_size": expected 1, 2, 4 or 8, got 3'),
        ("MhcBoundary", PLAIN | {"tp_size": -2}, r'field "tp_size": expected 1, 2, 4 or 8, got -2'),
        ("MhcBoundary", PLAIN | {"hc_mult": 2}, r'field "hc_mult": expected 4, got 2'),
        ("MhcBoundary", PLAIN | {"norm_eps": -1.0}, r'field "norm_eps": expected a finite number of 0 or more, got -1'),
        ("MhcBoundary", PLAIN | {"norm_eps": float("nan")}, r'field "norm_eps": expected .*, got nan'),
        ("MhcBoundary", PLAIN | {"norm_eps": float("inf")}, r'field "norm_eps": expected .*, got inf'),
        ("MhcBoundary", PLAIN | {"norm_eps": 1}, r'field "norm_eps": expected FLOAT32, got INT32'),
        ("MhcBoundary", PLAIN | {"collapse": 2}, r'field "collapse": expected 0 or 1, got 2'),
        ("MhcBoundary", PLAIN | {"top_k": 65}, r'field "top_k": expected 0 to 64, got 65'),
        ("MhcBoundary", {"tp_size": 2, "collapse": 0, "quantize": 1}, r'field "quantize": expected 0 with collapse=0'),
        ("MhcBoundary", PLAIN | {"top_k": 6, "published": 1}, r'field "published": expected 0 with top_k > 0'),
        ("MhcBoundary", PLAIN | {"rank": 2}, r'field "rank": expected -1 to tp_size-1 = 1, got 2'),
        ("MhcBoundary", PLAIN | {"rank": -2}, r'field "rank": expected -1 .*, got -2'),
        ("MhcBoundary", PLAIN | {"group": (1,)}, r'field "group": expected tp_size = 2 world ranks, got 1'),
        ("MhcBoundary", PLAIN | {"group": (1, 1)}, r'field "group": expected distinct world ranks, got \[1, 1\]'),
        ("MhcBoundary", PLAIN | {"group": (0, -1)}, r'field "group": expected world ranks of 0 or more, got -1'),
        ("MhcBoundary", PLAIN | {"eps": 1.0}, r'unknown field "eps": this library \(format 1\) knows format, tp_size'),
        ("MhcBoundary", PLAIN | {"format": 2, "new": 1}, r"the fields have format 2, .* newer trtllm_mhc"),
        ("MhcBoundary", PLAIN | {"format": 0}, r'field "format": expected 1, got 0'),
        ("MhcAllReduce", {}, r'MhcAllReduce: field "tp_size" is required'),
        ("MhcAllReduce", {"tp_size": 2, "strategy": "two"}, r'"strategy": expected "oneshot" or "nccl", got "two"'),
        ("MhcAllReduce", {"tp_size": 2, "norm_eps": 1.0}, r'unknown field "norm_eps"'),
        ("MhcPublishLinear", {}, r'MhcPublishLinear: field "tp_size" is required \(INT32, 1, 2, 4 or 8\), but missing'),
        ("MhcPublishLinear", {"tp_size": 2, "weight_type": 2}, r'"weight_type": expected 0 \(BF16\) or 1 .*, got 2'),
        ("MhcPublishLinear", {"tp_size": 2, "published": 1}, r'unknown field "published"'),
        ("MhcCoefficients", {}, r'MhcCoefficients: field "rms_norm_eps" is required \(FLOAT32, .*\), but missing'),
        ("MhcCoefficients", {"rms_norm_eps": 1.0, "hc_eps": 1.0}, r'field "post_alpha" is required .*, but missing'),
        ("MhcCoefficients", MIXES | {"rms_norm_eps": -1.0}, r'"rms_norm_eps": expected a finite number of 0 or more'),
        ("MhcCoefficients", MIXES | {"hc_eps": float("nan")}, r'field "hc_eps": expected a finite number .*, got nan'),
        ("MhcCoefficients", MIXES | {"hc_eps": 1}, r'field "hc_eps": expected FLOAT32, got INT32'),
        ("MhcCoefficients", MIXES | {"post_alpha": float("inf")}, r'"post_alpha": expected a finite number, got inf'),
        ("MhcCoefficients", MIXES | {"sinkhorn_iters": 0}, r'field "sinkhorn_iters": expected 1 or more, got 0'),
        ("MhcCoefficients", MIXES | {"broadcast": 2}, r'field "broadcast": expected 0 or 1, got 2'),
        ("MhcCoefficients", MIXES | {"hc_mult": 8}, r'field "hc_mult": expected 4, got 8'),
        ("MhcCoefficients", MIXES | {"tp_size": 2}, r'unknown field "tp_size": this library \(format 1\) knows format'),
        ("MhcCoefficients", MIXES | {"format": 2}, r"the fields have format 2, .* newer trtllm_mhc"),
    ],
)
def test_bad_fields_are_refused_and_say_why(name: str, attributes: dict[str, Any], message: str, capfd: Any) -> None:
    with pytest.raises(PluginError, match=message):
        create(name, attributes)
    assert take_error(any_thread=True) is None, "given out twice"
    assert f"[trtllm_mhc] ERROR: {name}: " in capfd.readouterr().err


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ([("tp_size", np.array([2], np.int64), "INT64")], 'field "tp_size": expected INT32, got INT64'),
        ([("tp_size", np.array([2.0], np.float32), "FLOAT32")], 'field "tp_size": expected INT32, got FLOAT32'),
        ([("tp_size", np.array([2, 4], np.int32), "INT32")], 'field "tp_size": expected 1 value, got 2'),
        ([("tp_size", np.array([], np.int32), "INT32")], 'field "tp_size": expected 1 value, got 0'),
        ([("tp_size", np.array([2], np.int32), "INT32")] * 2, 'field "tp_size": expected once, got twice'),
        ([("group", np.arange(65, dtype=np.int32), "INT32")], 'field "group": expected 0 to 64 values, got 65'),
        ([("tp_sïze", np.array([2], np.int32), "INT32")], 'unknown field "tp_s??ze"'),
    ],
)
def test_malformed_fields_are_refused(trt: ModuleType, fields: list[tuple[str, np.ndarray, str]], message: str) -> None:
    assert raw_create(trt, "MhcAllReduce", *fields) is None
    error = take_error()
    assert error is not None
    assert message in error


def test_an_empty_group_is_no_group(trt: ModuleType) -> None:
    fields = [("tp_size", np.array([2], np.int32), "INT32"), ("group", np.array([], np.int32), "INT32")]
    made = raw_create(trt, "MhcAllReduce", *fields)
    assert made is not None
    assert "group" not in build_capability(trt, made).metadata_string


def test_errors_belong_to_the_thread_that_caused_them(trt: ModuleType) -> None:
    del trt
    seen: dict[int, str | None] = {}
    barrier = threading.Barrier(4, timeout=30)

    def work(index: int) -> None:
        for round_ in range(50):
            barrier.wait()
            with pytest.raises(PluginError, match=f"got {100 * index + round_ + 10}$"):
                create("MhcAllReduce", {"tp_size": 100 * index + round_ + 10})
        seen[index] = take_error()

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert seen == dict.fromkeys(range(4))


def test_an_error_of_another_thread_is_found_when_asked_for() -> None:
    def fail() -> None:
        plugin.creator("MhcAllReduce").create_plugin("x", empty, phase)

    import tensorrt

    empty, phase = tensorrt.PluginFieldCollection([]), tensorrt.TensorRTPhase.BUILD
    thread = threading.Thread(target=fail)
    thread.start()
    thread.join(30)
    assert take_error() is None
    assert 'MhcAllReduce: field "tp_size" is required' in (take_error(any_thread=True) or "")
    assert take_error(any_thread=True) is None


def test_warmup_nests_and_ends_with_an_exception() -> None:
    setter = plugin.load().mhcPluginSetWarmup

    def current() -> int:
        was = setter(0)
        setter(was)
        return int(was)

    assert current() == 0
    with warmup():
        assert current() == 1
        with pytest.raises(KeyError), warmup():
            raise KeyError
        assert current() == 1
    assert current() == 0


def test_timing_cache_entries_ignore_the_rank_but_not_the_work(trt: ModuleType) -> None:
    def cache_id(**more: Any) -> str:
        made = create("MhcBoundary", PLAIN | more)  # a capability does not keep its plugin alive
        return str(build_capability(trt, made).timing_cache_id)

    assert len({cache_id(), cache_id(rank=0), cache_id(rank=1), cache_id(group=(4, 5))}) == 1
    variants = [{}, {"tp_size": 4}, {"collapse": 0}, {"published": 1}, {"quantize": 1}, {"top_k": 6}, {"top_k": 8}]
    for first, second in itertools.combinations(variants, 2):
        assert cache_id(**first) != cache_id(**second), (first, second)
    mixes = [create("MhcCoefficients", MIXES | more) for more in ({}, {"broadcast": 1}, {"sinkhorn_iters": 3})]
    assert len({build_capability(trt, made).timing_cache_id for made in mixes}) == 3
    linears = [create("MhcPublishLinear", {"tp_size": 2} | more) for more in ({}, {"weight_type": 1}, {"rank": 1})]
    assert len({build_capability(trt, made).timing_cache_id for made in linears}) == 2
