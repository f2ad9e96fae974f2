# SPDX-License-Identifier: Apache-2.0
"""The coefficients' kernels against the reference in float64 and in float32, and against themselves."""

from __future__ import annotations

import json
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from trtllm_mhc import reference
from trtllm_mhc.runtime.coefficients import Coefficients, coefficients, workspace_bytes
from trtllm_mhc.runtime.cuda import DeviceArray, Stream
from trtllm_mhc.runtime.library import InvalidArgumentError

Array = npt.NDArray[Any]
BF16 = ml_dtypes.bfloat16
HC = 4
NAMES = ("post", "comb", "pre")
SETTINGS: dict[str, Any] = {"rms_norm_eps": 1e-20, "hc_eps": 1e-6, "post_alpha": 2.0, "sinkhorn_iters": 20}

# Largest distances, in ulps, from the float64 result rounded to float32: twice what reference.coefficients_float32 has
# over these inputs (8, 31, 8 and 31, 88, 35), which is the kernel's arithmetic but for exp. The distance grows with the
# logits: one of size L has an error of L ulps of 1 from its roundings, which moves a mix by as much, relatively, and a
# residual mix by that of several logits. A lost term of the sums, TF32 or a fast exp would be hundreds to millions.
BOUNDS = {
    1.0: {"post": 16, "comb": 62, "pre": 16},
    4.0: {"post": 62, "comb": 176, "pre": 70},
}
ORDINARY = BOUNDS[1.0]


def values(rows: int, hidden: int, seed: int, *, broadcast: bool = False, width: float = 1.0) -> list[Array]:
    """streams, fn, scale and base with logits of about `width`."""
    rng = np.random.default_rng(seed)
    streams = rng.standard_normal((rows, HC, hidden), np.float32).astype(BF16)
    fn = rng.standard_normal((24, HC * hidden), np.float32) / np.float32(np.sqrt(HC * hidden))
    scale = np.float32(width) * np.float32([1.0, 0.7, 1.3])
    base = np.float32(width) * rng.standard_normal(24, np.float32)
    if broadcast:
        streams, fn = streams[:, 0].copy(), reference.broadcast_projection(fn, HC)
    return [streams, fn, scale, base]


def run(arguments: list[Array], stream: Stream, **changes: Any) -> Coefficients:
    arrays = [DeviceArray.from_numpy(array, stream) for array in arguments]
    rows = arguments[0].shape[0]
    out = Coefficients(*(DeviceArray(shape, np.float32) for shape in ((rows, HC), (rows, HC, HC), (rows, HC))))
    size = workspace_bytes(rows, arguments[0].shape[-1], broadcast=arguments[0].ndim == 2)
    workspace = DeviceArray((size,), np.uint8)
    for array in (*out, workspace):
        array.fill_bytes(0xFF, stream)
    coefficients(*arrays, **(SETTINGS | changes), stream=stream, out=out, workspace=workspace)
    stream.synchronize()
    return out


def on_host(out: Coefficients) -> dict[str, Array]:
    return {name: getattr(out, name).to_numpy() for name in NAMES}


def ulps(actual: Array, exact: Array) -> int:
    """The largest distance of positive float32 numbers, in ulps."""
    rounded = exact.astype(np.float32)
    assert (rounded > 0).all()
    assert (actual > 0).all(), "a mix is positive"
    return int(np.abs(actual.view(np.int32).astype(np.int64) - rounded.view(np.int32).astype(np.int64)).max())


@pytest.mark.parametrize("broadcast", [False, True])
@pytest.mark.parametrize("hidden", [4096, 5120, 7168])
@pytest.mark.parametrize("width", list(BOUNDS))
def test_distance_to_float64(
    hidden: int, broadcast: bool, width: float, record_property: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = values(64, hidden, seed=hidden, broadcast=broadcast, width=width)
    exact = reference.coefficients_float64(*arguments, **SETTINGS)
    with Stream() as stream:
        got = on_host(run(arguments, stream))
    distance = {name: ulps(got[name], getattr(exact, name)) for name in NAMES}
    record_property("ulps", json.dumps(distance))
    with capsys.disabled():
        print(f" ulps H={hidden} broadcast={broadcast} width={width}: {distance}", end=" ")
    assert all(distance[name] <= BOUNDS[width][name] for name in NAMES), distance


@pytest.mark.parametrize("broadcast", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, 8, 31, 64])
def test_closeness_to_the_float32_reference(rows: int, broadcast: bool) -> None:
    """Both have the same order of sums; only exp is another one."""
    arguments = values(rows, 5120, seed=rows, broadcast=broadcast)
    expected = reference.coefficients_float32(*arguments, **SETTINGS)
    with Stream() as stream:
        got = on_host(run(arguments, stream))
    for name in NAMES:
        assert ulps(got[name], getattr(expected, name)) <= 12, name


@pytest.mark.parametrize("iterations", [1, 2, 20])
def test_settings_count(iterations: int) -> None:
    """Every setting at a value where leaving it out would show."""
    arguments = values(3, 4096, seed=5)
    settings = {"rms_norm_eps": 0.5, "hc_eps": 0.0625, "post_alpha": 1.5, "sinkhorn_iters": iterations}
    exact = reference.coefficients_float64(*arguments, **settings)
    with Stream() as stream:
        got = on_host(run(arguments, stream, **settings))
    for name in NAMES:
        assert ulps(got[name], getattr(exact, name)) <= ORDINARY[name], name


@pytest.mark.parametrize("broadcast", [False, True])
@pytest.mark.parametrize("hidden", [4096, 5120, 7168])
def test_a_row_depends_on_nothing_else(hidden: int, broadcast: bool) -> None:
    """Repeated runs, and row i of any number of rows: the same bits."""
    arguments = values(64, hidden, seed=1, broadcast=broadcast)
    with Stream() as stream:
        first = on_host(run(arguments, stream))
        for _ in range(5):
            again = on_host(run(arguments, stream))
            for name in NAMES:
                np.testing.assert_array_equal(again[name].view(np.uint32), first[name].view(np.uint32), name)
        for begin, end in [*((row, row + 1) for row in range(64)), (0, 2), (3, 6), (10, 15), (20, 53), (1, 64)]:
            part = on_host(run([arguments[0][begin:end].copy(), *arguments[1:]], stream))
            for name in NAMES:
                np.testing.assert_array_equal(
                    part[name].view(np.uint32), first[name][begin:end].view(np.uint32), f"{name} of {begin}:{end}"
                )


def test_extreme_streams() -> None:
    """An all-zero row is finite with the smallest epsilon; a large and a tiny one have the mixes of any other size."""
    arguments = values(4, 5120, seed=2)
    streams = arguments[0].astype(np.float32)
    streams[0] = 0
    streams[1] *= np.float32(1e15)
    streams[2] *= np.float32(1e-8)
    arguments[0] = streams.astype(BF16)
    exact = reference.coefficients_float64(*arguments, **SETTINGS)
    with Stream() as stream:
        got = on_host(run(arguments, stream))
    for name in NAMES:
        assert np.isfinite(got[name]).all()
        assert ulps(got[name], getattr(exact, name)) <= ORDINARY[name], name


def test_in_a_graph() -> None:
    arguments = values(8, 5120, seed=4)
    others = values(8, 5120, seed=6)
    with Stream() as stream:
        expected = on_host(run(others, stream))
        arrays = [DeviceArray.from_numpy(array, stream) for array in arguments]
        workspace = DeviceArray((workspace_bytes(8, 5120),), np.uint8)
        out = coefficients(*arrays, **SETTINGS, stream=stream, workspace=workspace)
        stream.synchronize()
        with stream.capture() as graph:
            coefficients(*arrays, **SETTINGS, stream=stream, out=out, workspace=workspace)
        for array, other in zip(arrays, others, strict=True):
            array.copy_from(other, stream)
        graph.launch(stream)
        stream.synchronize()
        got = on_host(out)
        graph.close()
    for name in NAMES:
        np.testing.assert_array_equal(got[name].view(np.uint32), expected[name].view(np.uint32), name)


def test_no_rows() -> None:
    with Stream() as stream:
        out = on_host(run(values(0, 5120, seed=0), stream))
    assert [out[name].shape for name in NAMES] == [(0, HC), (0, HC, HC), (0, HC)]


def test_bad_arguments_are_refused() -> None:
    good = values(2, 4096, seed=0)
    with Stream() as stream:
        arrays = [DeviceArray.from_numpy(array, stream) for array in good]
        wide = DeviceArray((2, HC, 4096), np.float32)
        with pytest.raises(ValueError, match=r"streams: expected bfloat16 .*, got float32 \[2, 4, 4096\]"):
            coefficients(wide, *arrays[1:], **SETTINGS, stream=stream)
        with pytest.raises(ValueError, match=r"fn: expected float32 \[24, 16384\], got float32 \[24\]"):
            coefficients(arrays[0], arrays[3], *arrays[2:], **SETTINGS, stream=stream)
        with pytest.raises(InvalidArgumentError, match="sinkhorn_iters must be at least 1, got 0"):
            coefficients(*arrays, **(SETTINGS | {"sinkhorn_iters": 0}), stream=stream)
        with pytest.raises(InvalidArgumentError, match="hc_eps must be a number >= 0, got -1"):
            coefficients(*arrays, **(SETTINGS | {"hc_eps": -1.0}), stream=stream)
        small = DeviceArray((workspace_bytes(2, 4096) - 16,), np.uint8)
        with pytest.raises(InvalidArgumentError, match="workspace_bytes must be at least"):
            coefficients(*arrays, **SETTINGS, stream=stream, workspace=small)


@pytest.mark.parametrize("broadcast", [False, True])
def test_engine_is_the_kernel(trt: Any, broadcast: bool) -> None:
    """A built engine with the plugin gives the bits of a direct call, for several M."""
    from trtllm_mhc.network import functional
    from trtllm_mhc.network.plugins import add_coefficients

    arguments = values(64, 5120, seed=8, broadcast=broadcast)
    tail = arguments[0].shape[1:]
    logger = trt.Logger(trt.Logger.WARNING)
    builder = trt.Builder(logger)
    kinds = trt.NetworkDefinitionCreationFlag
    network = builder.create_network(1 << int(kinds.STRONGLY_TYPED) if hasattr(kinds, "STRONGLY_TYPED") else 0)
    streams = network.add_input("streams", trt.bfloat16, (-1, *tail))
    weights = [functional.constant(network, array) for array in arguments[1:]]
    for name, tensor in zip(NAMES, add_coefficients(network, streams, *weights, **SETTINGS), strict=True):
        tensor.name = name
        network.mark_output(tensor)
    profile = builder.create_optimization_profile()
    profile.set_shape("streams", (1, *tail), (8, *tail), (64, *tail))
    config = builder.create_builder_config()
    config.add_optimization_profile(profile)
    plan = builder.build_serialized_network(network, config)
    assert plan is not None
    runtime = trt.Runtime(logger)
    engine = runtime.deserialize_cuda_engine(plan)
    context = engine.create_execution_context()
    with Stream() as stream:
        for rows in (64, 1, 5, 64):
            part = [arguments[0][:rows].copy(), *arguments[1:]]
            expected = on_host(run(part, stream))
            fed = DeviceArray.from_numpy(part[0], stream)
            out = {name: DeviceArray(expected[name].shape, np.float32) for name in NAMES}
            context.set_input_shape("streams", part[0].shape)
            context.set_tensor_address("streams", fed.pointer)
            for name, array in out.items():
                array.fill_bytes(0xFF, stream)
                context.set_tensor_address(name, array.pointer)
            assert context.execute_async_v3(stream.handle)
            stream.synchronize()
            for name in NAMES:
                got = out[name].to_numpy()
                np.testing.assert_array_equal(got.view(np.uint32), expected[name].view(np.uint32), f"{name} M={rows}")
