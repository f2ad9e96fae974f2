# SPDX-License-Identifier: Apache-2.0
"""What surrounds a boundary when it is fused: other readers, outputs, names, neighbours; and the whole stack."""

from __future__ import annotations

import gc
import time

import numpy as np
import pytest

from trtllm_mhc.reference import assert_bits_equal, ulp_distance


@pytest.fixture
def forms(trt):
    import rewrite_forms

    return rewrite_forms


@pytest.fixture
def fuse(trt):
    from trtllm_mhc.rewrite import fuse_boundaries

    return fuse_boundaries


@pytest.fixture
def networks(trt, builder):
    flags = 0
    if hasattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED"):
        flags = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    return lambda count: [builder.create_network(flags) for _ in range(count)]


def boundary_layers(network):
    from trtllm_mhc.network import plugins

    layers = [network.get_layer(k) for k in range(network.num_layers)]
    return [layer for layer in layers if plugins.is_plugin_layer(layer, plugins.BOUNDARY)]


def live_types(forms, network):
    return [layer.type.name for layer in forms.live_layers(network)]


@pytest.fixture
def compare(forms, networks, fuse):
    """Writes the same network for two ranks twice, fuses one pair, and compares all outputs."""
    from trtllm_mhc.reference.interpreter import evaluate

    def compare(write, form=None, rounded=(), options=None):
        form = form or forms.Form()
        unfused, fused = networks(2), networks(2)
        for network in unfused + fused:
            writer = forms.Writer(network, form)
            write(writer, writer.inputs())
        reports = [fuse(network, options) for network in fused]
        used = {fused[0].get_input(k).name for k in range(fused[0].num_inputs)}
        feeds = [{name: array for name, array in feed.items() if name in used} for feed in forms.feeds(form)]
        before, after = evaluate(unfused, feeds), evaluate(fused, feeds)
        for old, new in zip(before, after, strict=True):
            assert list(old) == list(new)
            for name in old:
                if name in rounded:
                    assert ulp_distance(new[name], old[name]).max() <= 1
                else:
                    assert_bits_equal(new[name], old[name], name)
        return reports[0], fused[0]

    return compare


def test_streams_alone(compare, forms):
    def write(w, inputs):
        streams = w.post(w.all_reduce(inputs["x"]), *(inputs[name] for name in ("residual", "post", "comb")))
        w.output(streams=streams)

    report, network = compare(write)
    assert (report.full, report.residual_only, len(report.refused)) == (0, 1, 0)
    assert live_types(forms, network) == ["PLUGIN_V3"]


@pytest.mark.parametrize("readers", ["aux", "injection", "both_and_output"])
def test_streams_have_other_readers(compare, readers):
    def write(w, inputs):
        streams, layer_input = w.boundary(**inputs)
        outputs = {"layer_input": layer_input}
        if readers != "injection":
            wide = w.sum(w.wide(streams), 1)
            outputs["aux"] = w.narrow(w.mul(wide, w.scalar(0.25, 2)))
        if readers != "aux":
            outputs["injected"] = w.narrow(w.add(w.wide(streams), w.scalar(1.0, 3)))
        if readers == "both_and_output":
            outputs["streams"] = streams
        w.output(**outputs)

    report, network = compare(write, rounded=("layer_input",))
    assert report.full == 1
    assert len(boundary_layers(network)) == 1


def test_injection_before_the_collapse_leaves_the_collapse(compare):
    def write(w, inputs):
        streams = w.post(w.all_reduce(inputs["x"]), *(inputs[name] for name in ("residual", "post", "comb")))
        injected = w.narrow(w.add(w.wide(streams), w.scalar(1.0, 3)))
        w.output(layer_input=w.norm(w.collapse(injected, inputs["pre"]), inputs["gamma"]))

    report, _ = compare(write)
    assert (report.full, report.residual_only) == (0, 1)
    assert report.found[0].notes == ()


def test_collapsed_value_has_another_reader(compare):
    """The old collapse then stays for that reader, on the new streams."""

    def write(w, inputs):
        streams = w.post(w.all_reduce(inputs["x"]), *(inputs[name] for name in ("residual", "post", "comb")))
        collapsed = w.collapse(streams, inputs["pre"])
        w.output(layer_input=w.norm(collapsed, inputs["gamma"]), collapsed=collapsed)

    report, _ = compare(write, rounded=("layer_input",))
    assert report.full == 1


def test_two_entries_on_the_same_streams(compare, forms):
    """The second one reads the fused streams."""

    def write(w, inputs):
        streams = w.post(w.all_reduce(inputs["x"]), *(inputs[name] for name in ("residual", "post", "comb")))
        first = w.norm(w.collapse(streams, inputs["pre"]), inputs["gamma"])
        second = w.norm(w.collapse(streams, inputs["post"]), inputs["gamma"])
        w.output(first=first, second=second)

    report, network = compare(write, rounded=("first",))
    assert report.full == 1
    assert live_types(forms, network).count("PLUGIN_V3") == 1


def test_all_reduce_without_a_boundary_stays(compare, forms):
    def write(w, inputs):
        embedded = w.all_reduce(w.mul(inputs["x"], inputs["x"]))
        streams, layer_input = w.boundary(**{**inputs, "x": embedded})
        w.output(streams=streams, layer_input=layer_input)

    report, network = compare(write, rounded=("layer_input",))
    assert report.full == 1
    assert len(report.other_all_reduces) == 1
    assert live_types(forms, network).count("PLUGIN_V3") == 2


def test_shared_gamma_and_chained_boundaries(compare):
    def write(w, inputs):
        streams, layer_input = w.boundary(**inputs)
        again = {**inputs, "x": layer_input, "residual": streams}
        streams, layer_input = w.boundary(**again)
        w.output(streams=streams, layer_input=layer_input)

    report, network = compare(write, rounded=("streams", "layer_input"))
    assert report.full == 2
    first, second = boundary_layers(network)
    assert second.get_input(0) is first.get_output(1)
    assert second.get_input(1) is first.get_output(0)
    assert [first.name, second.name] == ["mhc_boundary_0", "mhc_boundary_1"]


def test_pre_mixes_each_of_its_own_layer(compare):
    """Whatever carried pre-mix a collapse uses, the fused one uses the same."""

    def write(w, inputs):
        streams, layer_input = w.boundary(**{**inputs, "pre": inputs["post"]})
        streams, layer_input = w.boundary(**{**inputs, "x": layer_input, "residual": streams})
        w.output(streams=streams, layer_input=layer_input)

    report, _ = compare(write, rounded=("streams", "layer_input"))
    assert report.full == 2


def test_eps_of_each_layer(forms, network, fuse):
    from trtllm_mhc.network import plugins

    w = forms.Writer(network, forms.Form(eps=1e-20))
    inputs = w.inputs()
    streams, layer_input = w.boundary(**inputs)
    other = forms.Writer(network, forms.Form(eps=1e-5))
    streams, layer_input = other.boundary(**{**inputs, "x": layer_input, "residual": streams})
    w.output(streams=streams, layer_input=layer_input)
    assert fuse(network).full == 2
    eps = [plugins.read_fields(layer)["norm_eps"] for layer in boundary_layers(network)]
    assert [np.float32(each) for each in eps] == [np.float32(1e-20), np.float32(1e-5)]


def test_outputs_keep_names_order_and_formats(trt, forms, network, fuse):
    w = forms.Writer(network, forms.Form())
    inputs = w.inputs()
    streams, layer_input = w.boundary(**inputs)
    other = w.mul(inputs["x"], inputs["x"])
    w.output(
        before=other, layer_input=layer_input, between=w.add(other, other), streams=streams, after=w.mul(other, other)
    )
    layer_input.allowed_formats = 1 << int(trt.TensorFormat.LINEAR)
    kept = [layer_input.allowed_formats, streams.allowed_formats]
    assert fuse(network).full == 1
    outputs = [network.get_output(k) for k in range(network.num_outputs)]
    assert [tensor.name for tensor in outputs] == ["before", "layer_input", "between", "streams", "after"]
    (layer,) = boundary_layers(network)
    assert (outputs[1], outputs[3]) == (layer.get_output(1), layer.get_output(0))
    assert [outputs[1].allowed_formats, outputs[3].allowed_formats] == kept
    assert all(tensor.is_network_output for tensor in outputs)
    assert not layer_input.is_network_output
    assert not streams.is_network_output


def test_fused_layer_is_named_apart_from_others(forms, network, fuse):
    w = forms.Writer(network, forms.Form())
    inputs = w.inputs()
    streams, layer_input = w.boundary(**inputs)
    w.output(streams=streams, layer_input=layer_input)
    network.get_layer(0).name = "mhc_boundary_0"
    assert fuse(network).found[0].name == "mhc_boundary_1"


def test_networks_without_outputs_are_an_error(forms, network, fuse):
    forms.Writer(network, forms.Form()).inputs()
    with pytest.raises(ValueError, match="no outputs"):
        fuse(network)


def test_group_and_rank_reach_the_plugin(trt, forms, network, fuse):
    from trtllm_mhc.network import plugins

    w = forms.Writer(network, forms.Form())
    w.all_reduce = lambda x: plugins.add_all_reduce(network, x, tp_size=2, rank=1, group=(5, 3))
    inputs = w.inputs()
    streams, layer_input = w.boundary(**inputs)
    w.output(streams=streams, layer_input=layer_input)
    assert fuse(network).full == 1
    fields = plugins.read_fields(boundary_layers(network)[0])
    assert (fields["tp_size"], fields["rank"], fields["group"]) == (2, 1, (5, 3))


@pytest.mark.parametrize(
    ("variant", "code"),
    [
        ("norm_reads_unrounded", "norm_reads_unrounded"),
        ("not_rounded", "collapse_not_rounded"),
        ("no_norm", "no_norm"),
        ("norm_in_bfloat16", "norm_not_in_float32"),
        ("sum_for_mean", "no_norm"),
    ],
)
def test_entries_of_other_arithmetic_are_left_out(compare, forms, variant, code):
    def write(w, inputs):
        streams = w.post(w.all_reduce(inputs["x"]), *(inputs[name] for name in ("residual", "post", "comb")))
        narrow = w.narrow
        w.narrow = lambda x: x
        unrounded = w.collapse(streams, inputs["pre"])
        w.narrow = narrow
        collapsed = w.narrow(unrounded)
        if variant == "norm_reads_unrounded":
            mean_square = w.mean_square(unrounded)
            w.mean_square = lambda wide: mean_square
            w.output(result=w.norm(collapsed, inputs["gamma"]))
        elif variant == "norm_in_bfloat16":
            w.wide = lambda x: x
            w.scalar = lambda value, rank: w.narrow(forms.Writer.scalar(w, value, rank))
            w.output(result=w.norm(collapsed, inputs["gamma"]))
        elif variant == "sum_for_mean":
            w.mean_square = lambda wide: w.sum(w.mul(wide, wide), -1, keep=True)
            w.output(result=w.norm(collapsed, inputs["gamma"]))
        elif variant == "not_rounded":
            w.output(result=w.norm(unrounded, inputs["gamma"]))
        else:
            w.output(result=collapsed)

    report, _ = compare(write)
    (entry,) = report.found
    assert (entry.status, [note.code for note in entry.notes]) == ("residual_only", [code])


def build_stack(network, layers, all_reduce="plugin", coefficients="native", **config):
    from trtllm_mhc.models.deepseek_v41.config import DeepseekV41Config
    from trtllm_mhc.models.deepseek_v41.stack import build_boundary_stack
    from trtllm_mhc.models.deepseek_v41.weights import ModelWeights
    from trtllm_mhc.network.boundaries import CommunicatorSpec

    config = DeepseekV41Config(num_hidden_layers=layers, **config)
    spec = CommunicatorSpec(2, all_reduce=all_reduce)
    weights = ModelWeights(config)
    return build_boundary_stack(network, config, weights, spec, rank=0, sublayers="none", coefficients=coefficients)


@pytest.mark.parametrize("all_reduce", ["plugin", "dist_collective"])
def test_stack(trt, forms, network, fuse, all_reduce):
    if all_reduce == "dist_collective" and not hasattr(trt, "IDistCollectiveLayer"):
        pytest.skip(f"TensorRT {trt.__version__} has no DIST_COLLECTIVE layer")
    build_stack(network, 40, all_reduce)
    report = fuse(network)
    assert (len(report.found), report.full, report.residual_only) == (80, 77, 3)
    assert report.exit_code() == report.exit_code(require=80) == 0
    assert report.exit_code(require=81) == 1
    residual_only = [k for k, entry in enumerate(report.found) if entry.status == "residual_only"]
    assert residual_only == [1, 27, 79]  # before the injections of layers 1 and 14, and the last
    types = live_types(forms, network)
    assert types.count("PLUGIN_V3") == 80
    assert "DIST_COLLECTIVE" not in types

    before = forms.snapshot(network)
    again = fuse(network)
    assert forms.snapshot(network) == before
    assert (again.found, again.already_fused) == ((), 80)
    assert again.exit_code(require=80) == 0


def test_stack_with_plugin_coefficients(trt, forms, network, fuse):
    from trtllm_mhc.network import plugins

    build_stack(network, 40, coefficients="plugin")
    report = fuse(network)
    assert (len(report.found), report.full, report.residual_only) == (80, 77, 3)
    live = [layer for layer in forms.live_layers(network) if layer.type == trt.LayerType.PLUGIN_V3]
    count = {name: sum(plugins.is_plugin_layer(layer, name) for layer in live) for name in plugins.PLUGINS}
    assert count == {"MhcBoundary": 80, "MhcAllReduce": 0, "MhcCoefficients": 80, "MhcPublishLinear": 0}
    again = fuse(network)
    assert (again.found, again.already_fused) == ((), 80)


def test_reports_of_equal_networks_are_equal(networks, fuse):
    pair = networks(2)
    for network in pair:
        build_stack(network, 2)
    first, second = (fuse(network) for network in pair)
    assert first == second


def test_time_is_linear_in_the_layers(networks, fuse):
    def seconds(layers):
        (network,) = networks(1)
        build_stack(network, layers, hc_sinkhorn_iters=2)
        gc.collect()
        start = time.process_time()
        assert len(fuse(network).fused) == 2 * layers
        return time.process_time() - start

    seconds(4)
    # A pass that looked at all layers for each boundary would take 64 times as long for 8 times the layers.
    assert seconds(160) < 20 * seconds(20)


def test_debug_marks_move_to_the_new_tensors(forms, network, fuse):
    w = forms.Writer(network, forms.Form())
    streams, layer_input = w.boundary(**w.inputs())
    w.output(result=w.narrow(w.add(w.sum(w.wide(streams), 1), w.wide(layer_input))))
    for name, tensor in {"streams": streams, "layer_input": layer_input}.items():
        tensor.name = name
        assert network.mark_debug(tensor)
    assert fuse(network).full == 1
    (layer,) = boundary_layers(network)
    new = [layer.get_output(k) for k in range(2)]
    assert [tensor.name for tensor in new] == ["streams", "layer_input"]
    assert all(network.is_debug_tensor(tensor) for tensor in new)
    assert not any(network.is_debug_tensor(tensor) for tensor in (streams, layer_input))
    # Nothing keeps the old all-reduce alive.
    assert fuse(network).found == ()


def test_weakly_typed_networks_are_an_error(trt, builder, forms, fuse):
    if not trt.__version__.startswith("10."):
        pytest.skip(f"TensorRT {trt.__version__} has strongly typed networks only")
    network = builder.create_network(0)
    network.mark_output(network.add_identity(network.add_input("x", trt.float32, (1,))).get_output(0))
    with pytest.raises(ValueError, match="strongly typed"):
        fuse(network)


def test_a_boundary_fused_before_is_a_user_of_the_mailbox(forms, network, fuse):
    """A second chain on the same group is not fused in a later run either."""
    w = forms.Writer(network, forms.Form())
    inputs = w.inputs()
    streams, layer_input = w.boundary(**inputs)
    w.output(streams=streams, layer_input=layer_input)
    assert fuse(network).full == 1
    other = w.boundary(**{**inputs, "x": w.mul(inputs["x"], inputs["x"])})
    w.output(other_streams=other[0], other_layer_input=other[1])
    report = fuse(network)
    assert report.already_fused == 1
    assert [[reason.code for reason in entry.reasons] for entry in report.found] == [["unordered"]]
    # One that waits for the first by its layer input alone is.
    more = w.boundary(**{**inputs, "x": boundary_layers(network)[0].get_output(1)})
    network.unmark_output(other[0])
    network.unmark_output(other[1])
    w.output(more=more[0], more_layer_input=more[1])
    assert fuse(network).full == 1
