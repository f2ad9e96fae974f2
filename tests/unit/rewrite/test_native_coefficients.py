# SPDX-License-Identifier: Apache-2.0
"""Native layers of a sublayer's mixes become one plugin layer, on request."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

HIDDEN = 4096
SETTINGS = {"rms_norm_eps": 1e-20, "hc_eps": 1e-6, "post_alpha": 2.0, "sinkhorn_iters": 20}


@pytest.fixture
def forms(trt):
    import rewrite_forms

    return rewrite_forms


@pytest.fixture
def fuse(trt):
    from trtllm_mhc.rewrite import FuseOptions, fuse_boundaries

    return lambda network: fuse_boundaries(network, FuseOptions(coefficients=True))


def weights(hidden=HIDDEN, hc=4, broadcast=False):
    rng = np.random.default_rng(2)
    count, features = (2 + hc) * hc, hidden * (1 if broadcast else hc)
    fn = rng.standard_normal((count, features)).astype(np.float32) / np.float32(np.sqrt(features))
    return fn, np.array([1.0, 0.7, 1.3], np.float32), rng.standard_normal(count).astype(np.float32)


def write(trt, network, arrays, form="native", shape=(-1, 4, HIDDEN), **settings):
    """Native mixes of an input ``streams``, as outputs."""
    from trtllm_mhc.network import functional, ops

    streams = network.add_input("streams", trt.bfloat16, shape)
    if form == "projection_columns":
        linear = functional.linear

        def columns(network, x, weight):
            w = functional.constant(network, np.ascontiguousarray(weight.T))
            return ops.output(
                network.add_matrix_multiply(x, trt.MatrixOperation.NONE, w, trt.MatrixOperation.NONE), "linear"
            )

        functional.linear = columns
        try:
            results = functional.mhc_coefficients(network, streams, *arrays, **(SETTINGS | settings))
        finally:
            functional.linear = linear
    else:
        results = functional.mhc_coefficients(network, streams, *arrays, **(SETTINGS | settings))
    for name, tensor in zip(("post", "comb", "pre"), results, strict=True):
        tensor.name = name
        network.mark_output(tensor)
    return SimpleNamespace(streams=streams, post=results[0], comb=results[1], pre=results[2])


@pytest.mark.parametrize("form", ["native", "projection_columns"])
@pytest.mark.parametrize("broadcast", [False, True])
@pytest.mark.parametrize(
    "changes", [{}, {"sinkhorn_iters": 1, "hc_eps": 1e-3, "rms_norm_eps": 1e-5, "post_alpha": 1.5}]
)
def test_fused(trt, builder, forms, fuse, form, broadcast, changes):
    import ml_dtypes

    from trtllm_mhc.network import plugins
    from trtllm_mhc.reference.interpreter import evaluate

    flags = 0
    if hasattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED"):
        flags = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    unfused, fused = (builder.create_network(flags) for _ in range(2))
    shape = (-1, HIDDEN) if broadcast else (-1, 4, HIDDEN)
    arrays = weights(broadcast=broadcast)
    for network in (unfused, fused):
        write(trt, network, arrays, form, shape, **changes)
    report = fuse(fused)
    (entry,) = report.coefficients
    assert (entry.status, entry.streams, entry.comb, entry.reasons) == ("fused", "streams", "comb", ())
    (layer,) = [each for each in forms.live_layers(fused) if each.type == trt.LayerType.PLUGIN_V3]
    assert layer.name == entry.name == "mhc_coefficients_0"
    fields = plugins.read_fields(layer)
    wanted = SETTINGS | changes
    assert {name: fields[name] for name in wanted} == {
        name: value if isinstance(value, int) else float(np.float32(value)) for name, value in wanted.items()
    }
    assert fields["broadcast"] == int(broadcast)
    streams = np.random.default_rng(3).standard_normal((3, *shape[1:])).astype(ml_dtypes.bfloat16)
    ((old,), (new,)) = (evaluate([network], [{"streams": streams}]) for network in (unfused, fused))
    assert list(old) == list(new)
    for name in old:
        np.testing.assert_allclose(new[name], old[name], rtol=2e-5, atol=0)
    assert fuse(fused).coefficients == ()


def test_not_without_being_asked(trt, network, forms):
    from trtllm_mhc.rewrite import fuse_boundaries

    write(trt, network, weights())
    before = forms.snapshot(network)
    assert fuse_boundaries(network).coefficients == ()
    assert forms.snapshot(network) == before


@pytest.mark.parametrize("size", [{"hidden": 64}, {"hc": 3}])
def test_sizes_that_the_plugin_has_not(trt, network, forms, fuse, size):
    hidden, hc = size.get("hidden", HIDDEN), size.get("hc", 4)
    write(trt, network, weights(hidden, hc), shape=(-1, hc, hidden))
    before = forms.snapshot(network)
    (entry,) = fuse(network).coefficients
    assert (entry.status, [reason.code for reason in entry.reasons]) == ("refused", ["coefficients_size"])
    assert forms.snapshot(network) == before


def test_whole_stack(trt, network, forms, fuse):
    """Boundaries and mixes take each other's results."""
    from trtllm_mhc.models.deepseek_v41.config import DeepseekV41Config
    from trtllm_mhc.models.deepseek_v41.stack import build_boundary_stack
    from trtllm_mhc.models.deepseek_v41.weights import ModelWeights
    from trtllm_mhc.network import plugins
    from trtllm_mhc.network.boundaries import CommunicatorSpec

    config = DeepseekV41Config(num_hidden_layers=3)
    build_boundary_stack(network, config, ModelWeights(config), CommunicatorSpec(2), rank=0, sublayers="none")
    report = fuse(network)
    assert (report.full, report.residual_only, len(report.coefficients)) == (4, 2, 6)
    assert "coefficients of 6 of 6 sublayers fused" in report.summary()
    layers = {layer.name: layer for layer in forms.live_layers(network)}
    assert not [layer for layer in layers.values() if layer.type == trt.LayerType.SOFTMAX]
    first, second = layers["mhc_boundary_0"], layers["mhc_coefficients_1"]
    assert second.get_input(0) is first.get_output(0)
    mixes = layers["mhc_coefficients_0"]
    assert [first.get_input(k) for k in (2, 3, 4)] == [mixes.get_output(k) for k in (0, 1, 2)]
    assert plugins.is_plugin_layer(mixes, plugins.COEFFICIENTS)


def left_alone(forms, network, fuse):
    before = forms.snapshot(network)
    assert fuse(network).coefficients == ()
    assert forms.snapshot(network) == before


def test_a_reader_in_between(trt, network, forms, fuse):
    """The softmax itself is read by something else."""
    write(trt, network, weights())
    softmax = next(
        network.get_layer(k) for k in range(network.num_layers) if network.get_layer(k).type == trt.LayerType.SOFTMAX
    )
    network.mark_output(softmax.get_output(0))
    left_alone(forms, network, fuse)


@pytest.mark.parametrize("what", ["scale", "hc_eps"])
def test_other_numbers_than_one(trt, network, forms, fuse, what):
    """A scale of its own for each coefficient, or another epsilon in one of the rounds."""
    from trtllm_mhc.network import functional, ops

    plain = functional.constant
    count = 0

    def constant(network, value):
        nonlocal count
        if what == "scale" and value.shape == (1, 24) and count == 0:
            value, count = value * np.linspace(1, 2, 24, dtype=np.float32), 1
        if what == "hc_eps" and value.shape == (1, 1):
            value = value * np.float32(2)
        return plain(network, value)

    functional.constant = constant
    try:
        write(trt, network, weights())
    finally:
        functional.constant = plain
    assert ops
    left_alone(forms, network, fuse)


def test_onnx(trt, parse, builder):
    """The same in ONNX's operators, as torch exports it."""
    onnx = pytest.importorskip("onnx")
    ir = pytest.importorskip("onnx_ir")
    import ml_dtypes
    from onnx import TensorProto, helper, numpy_helper

    from trtllm_mhc.reference.interpreter import evaluate
    from trtllm_mhc.rewrite import FuseOptions
    from trtllm_mhc.rewrite.onnx import fuse_model

    fn, scale, base = weights()
    nodes, initializers = [], []

    def node(op, *inputs, **attributes):
        names = []
        for each in inputs:
            if not isinstance(each, str):
                initializers.append(numpy_helper.from_array(np.asarray(each), f"c{len(initializers)}"))
                each = initializers[-1].name
            names.append(each)
        nodes.append(helper.make_node(op, names, [f"t{len(nodes)}"], **attributes))
        return nodes[-1].output[0]

    ints = lambda *values: np.array(values, np.int64)  # noqa: E731
    number = np.float32
    flat = node("Reshape", node("Cast", "streams", to=TensorProto.FLOAT), ints(-1, 4 * HIDDEN))
    mean = node("ReduceMean", node("Mul", flat, flat), ints(-1), keepdims=1)
    inverse = node("Reciprocal", node("Sqrt", node("Add", mean, np.array(1e-20, number))))
    mixes = node("Mul", node("MatMul", flat, np.ascontiguousarray(fn.T)), inverse)

    def part(begin, end, index):
        piece = node("Slice", mixes, ints(begin), ints(end), ints(1))
        return node("Add", node("Mul", piece, np.array(scale[index], number)), base[begin:end])

    eps = np.array(1e-6, number)
    pre = node("Add", node("Sigmoid", part(0, 4, 0)), eps)
    post = node("Mul", node("Sigmoid", part(4, 8, 1)), np.array(2.0, number))
    comb = node("Add", node("Softmax", node("Reshape", part(8, 24, 2), ints(-1, 4, 4)), axis=-1), eps)
    for axis in [1] + [2, 1] * 4:
        comb = node("Div", comb, node("Add", node("ReduceSum", comb, ints(axis), keepdims=1), eps))
    results = {"post": post, "comb": comb, "pre": pre}
    nodes += [helper.make_node("Identity", [value], [name]) for name, value in results.items()]
    shapes = {"post": ["M", 4], "comb": ["M", 4, 4], "pre": ["M", 4]}
    graph = helper.make_graph(
        nodes,
        "mixes",
        [helper.make_tensor_value_info("streams", TensorProto.BFLOAT16, ["M", 4, HIDDEN])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()],
        initializers,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)])
    loaded = ir.from_proto(model)
    report = fuse_model(loaded, FuseOptions(coefficients=True))
    assert [entry.status for entry in report.coefficients] == ["fused"]
    fused = ir.to_proto(loaded)
    onnx.checker.check_model(fused)
    assert "Softmax" not in [each.op_type for each in fused.graph.node]
    streams = np.random.default_rng(3).standard_normal((3, 4, HIDDEN)).astype(ml_dtypes.bfloat16)
    (old,), (new,) = (evaluate([parse(each)], [{"streams": streams}]) for each in (model, fused))
    for name in results:
        np.testing.assert_allclose(new[name], old[name], rtol=2e-5, atol=0)
