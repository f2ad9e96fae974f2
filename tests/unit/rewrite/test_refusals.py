# SPDX-License-Identifier: Apache-2.0
"""Every reason to refuse a boundary, met through the public entry; a refused network is not touched."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest


@pytest.fixture
def forms(trt):
    import rewrite_forms

    return rewrite_forms


@pytest.fixture
def writer(forms, network):
    """Makes a writer on the test's network."""
    return lambda **form: forms.Writer(network, forms.Form(**form))


@pytest.fixture
def refused(forms, network):
    """Runs the pass and checks that it refuses all boundaries for this one reason, and changes nothing."""
    from trtllm_mhc.rewrite import FuseOptions, fuse_boundaries

    def refused(code, boundaries=1, **options):
        before = forms.snapshot(network)
        report = fuse_boundaries(network, FuseOptions(**options))
        assert forms.snapshot(network) == before
        assert [entry.status for entry in report.found] == ["refused"] * boundaries
        assert [[reason.code for reason in entry.reasons] for entry in report.found] == [[code]] * boundaries
        for entry in report.found:
            (reason,) = entry.reasons
            assert reason.what.endswith((".", ")."))
            assert reason.remedy.endswith(".")
        assert report.exit_code() == report.exit_code(require=1) == 1
        return report

    return refused


@pytest.fixture
def needs_collectives(trt):
    if not hasattr(trt, "IDistCollectiveLayer"):
        pytest.skip(f"TensorRT {trt.__version__} has no DIST_COLLECTIVE layer")


def means(writer, streams):
    """Weights [M, hc] f32 computed from streams."""
    import tensorrt as trt

    return writer.sum(writer.wide(streams), -1, operation=trt.ReduceOperation.AVG)


# The all-reduce.


@pytest.mark.usefixtures("needs_collectives")
def test_unlabelled_collective(writer, forms, network, refused):
    forms.write_boundary(network, forms.Form(all_reduce="unlabelled"))
    refused("collective_unknown")


@pytest.mark.usefixtures("needs_collectives")
def test_unlabelled_collective_with_the_callers_word(forms, network):
    from trtllm_mhc.rewrite import FuseOptions, fuse_boundaries

    forms.write_boundary(network, forms.Form(all_reduce="unlabelled"))
    report = fuse_boundaries(network, FuseOptions(unlabelled_collectives="all_reduce_sum"))
    assert (report.full, report.found[0].tp_size) == (1, 2)


@pytest.mark.usefixtures("needs_collectives")
def test_collective_of_unknown_size(writer, forms, network, refused):
    forms.write_boundary(network, forms.Form(all_reduce="unlabelled", tp_size=1))
    refused("group_unknown", unlabelled_collectives="all_reduce_sum")


@pytest.mark.usefixtures("needs_collectives")
def test_group_of_three(forms, network, refused):
    forms.write_boundary(network, forms.Form(all_reduce="dist_collective", tp_size=3))
    refused("tp_size")


@pytest.mark.usefixtures("needs_collectives")
def test_rank_outside_the_group(forms, network, refused):
    forms.write_boundary(network, forms.Form(all_reduce="dist_collective"))
    refused("rank", rank=2)


@pytest.mark.usefixtures("needs_collectives")
def test_collective_that_is_no_sum_is_no_boundary(trt, writer, forms, network):
    from trtllm_mhc.network.collectives import read_collective
    from trtllm_mhc.rewrite import fuse_boundaries

    forms.write_boundary(network, forms.Form(all_reduce="dist_collective"))
    (layer,) = [layer for layer in forms.live_layers(network) if layer.type == trt.LayerType.DIST_COLLECTIVE]
    layer.metadata = layer.metadata.replace("SUM", "MAX")
    assert read_collective(layer).reduction == "MAX"
    report = fuse_boundaries(network)
    assert (report.found, report.other_all_reduces) == ((), ())


@pytest.mark.parametrize("options", [{"group": (2, 3)}, {"tp_size": 4}, {"tp_size": 2, "group": (1, 0)}])
def test_group_differs(forms, network, refused, options):
    forms.write_boundary(network, forms.Form())
    refused("group_differs", **options)


# What hangs on the all-reduce's result.


def test_result_is_an_output(writer, refused):
    w = writer()
    inputs = w.inputs()
    reduced = w.all_reduce(inputs["x"])
    streams = w.post(reduced, *(inputs[name] for name in ("residual", "post", "comb")))
    w.output(streams=streams, reduced=reduced)
    refused("network_output")


def test_result_is_a_debug_tensor(writer, network, refused):
    w = writer()
    inputs = w.inputs()
    reduced = w.all_reduce(inputs["x"])
    w.output(streams=w.post(reduced, *(inputs[name] for name in ("residual", "post", "comb"))))
    assert network.mark_debug(reduced)
    refused("debug_tensor")


def test_result_has_another_reader(writer, refused):
    w = writer()
    inputs = w.inputs()
    reduced = w.all_reduce(inputs["x"])
    streams = w.post(reduced, *(inputs[name] for name in ("residual", "post", "comb")))
    w.output(streams=streams, other=w.mul(reduced, reduced))
    refused("extra_consumer")


def test_result_has_a_reader_that_nothing_needs(writer):
    from trtllm_mhc.rewrite import fuse_boundaries

    w = writer()
    inputs = w.inputs()
    reduced = w.all_reduce(inputs["x"])
    w.output(streams=w.post(reduced, *(inputs[name] for name in ("residual", "post", "comb"))))
    w.mul(reduced, reduced)
    assert fuse_boundaries(w.network).residual_only == 1


def test_wide_result_has_another_reader(trt, forms, writer, network, refused):
    forms.write_boundary(network, forms.Form())
    (reduced,) = [layer.get_output(0) for layer in forms.live_layers(network) if layer.type == trt.LayerType.PLUGIN_V3]
    (wide,) = [
        layer.get_output(0)
        for layer in forms.live_layers(network)
        if layer.type == trt.LayerType.CAST and layer.get_input(0) is reduced
    ]
    writer().output(other=writer().mul(wide, wide))
    refused("extra_consumer")


def test_two_posts(writer, refused):
    w = writer()
    inputs = w.inputs()
    reduced = w.all_reduce(inputs["x"])
    residual, post, comb = (inputs[name] for name in ("residual", "post", "comb"))
    w.output(a=w.post(reduced, residual, post, comb), b=w.post(reduced, residual, inputs["pre"], comb))
    refused("two_posts")


def test_bias(trt, writer, forms, network, refused):
    from trtllm_mhc.network import ops

    w = writer()
    inputs = w.inputs()
    bias = ops.constant(network, np.ones((1, forms.HIDDEN), forms.BFLOAT16))
    reduced = w.add(w.all_reduce(inputs["x"]), bias)
    w.output(streams=w.post(reduced, *(inputs[name] for name in ("residual", "post", "comb"))))
    refused("addend")


# The post-mix.


@pytest.mark.parametrize("hc", [2, 3, 5, 8])
def test_other_numbers_of_streams(forms, network, refused, hc):
    forms.write_boundary(network, forms.Form(hc=hc))
    refused("streams")


@pytest.mark.usefixtures("needs_collectives")
@pytest.mark.parametrize("hidden", [64, 4104, 6144])
def test_other_hidden_sizes(forms, network, refused, hidden):
    forms.write_boundary(network, forms.Form(hidden=hidden, all_reduce="dist_collective"))
    refused("hidden_size")


def test_mixes_in_bfloat16(trt, forms, network, refused):
    """Coefficients that were rounded are widened again: the plugin takes the widened ones."""
    from trtllm_mhc.network import ops
    from trtllm_mhc.rewrite import fuse_boundaries

    w = forms.Writer(network, forms.Form())
    inputs = w.inputs()
    post = ops.cast(network, ops.cast(network, inputs["post"], trt.bfloat16), trt.float32)
    w.output(streams=w.post(w.all_reduce(inputs["x"]), inputs["residual"], post, inputs["comb"]))
    assert fuse_boundaries(network).residual_only == 1


@pytest.mark.parametrize("what", ["residual", "streams"])
def test_streams_in_float32(trt, forms, network, refused, what):
    from trtllm_mhc.network import ops

    w = forms.Writer(network, forms.Form())
    inputs = w.inputs()
    residual = inputs["residual"]
    if what == "residual":
        residual = network.add_input("wide_residual", trt.float32, residual.shape)
    else:
        w.narrow = lambda x: x
    streams = w.post(w.all_reduce(inputs["x"]), residual, inputs["post"], inputs["comb"])
    assert streams.dtype == (trt.bfloat16 if what == "residual" else trt.float32)
    w.output(streams=ops.cast(network, ops.add(network, streams, streams), trt.float32))
    refused("dtype")


@pytest.mark.usefixtures("needs_collectives")
def test_sum_in_float32(trt, forms, network, refused):
    w = forms.Writer(network, forms.Form(all_reduce="dist_collective"))
    inputs = w.inputs()
    streams = w.post(w.all_reduce(w.wide(inputs["x"])), inputs["residual"], inputs["post"], inputs["comb"])
    w.output(streams=streams)
    refused("dtype")


def test_post_in_bfloat16(trt, forms, network, refused):
    from trtllm_mhc.network import ops

    w = forms.Writer(network, forms.Form())
    inputs = w.inputs()
    w.wide = lambda x: x
    w.narrow = lambda x: x
    post, comb = (ops.cast(network, inputs[name], trt.bfloat16) for name in ("post", "comb"))
    w.output(streams=w.post(w.all_reduce(inputs["x"]), inputs["residual"], post, comb))
    report_codes = {"dtype", "extra_rounding"}
    from trtllm_mhc.rewrite import fuse_boundaries

    before = forms.snapshot(network)
    (entry,) = fuse_boundaries(network).found
    assert {reason.code for reason in entry.reasons} == report_codes
    assert forms.snapshot(network) == before


def test_post_rounded_on_the_way(forms, network, refused):
    w = forms.Writer(network, forms.Form())
    inputs = w.inputs()
    lead = 1
    own = w.mul(w.unsqueeze(w.wide(w.all_reduce(inputs["x"])), lead), w.unsqueeze(inputs["post"], lead + 1))
    mixed = w.matmul(inputs["comb"], "TRANSPOSE", w.wide(inputs["residual"]), "NONE")
    w.output(streams=w.narrow(w.add(w.wide(w.narrow(own)), mixed)))
    refused("extra_rounding")


def test_in_a_loop(trt, forms, network, refused):
    from trtllm_mhc.network import ops

    w = forms.Writer(network, forms.Form(batch="static"))
    inputs = w.inputs()
    loop = network.add_loop()
    trips = ops.constant(network, np.array(3, np.int32))
    loop.add_trip_limit(trips, trt.TripLimit.COUNT)
    carried = loop.add_recurrence(inputs["residual"])
    streams = w.post(w.all_reduce(inputs["x"]), carried.get_output(0), inputs["post"], inputs["comb"])
    carried.set_input(1, streams)
    result = loop.add_loop_output(carried.get_output(0), trt.LoopOutput.LAST_VALUE)
    w.output(result=result.get_output(0))
    refused("loop")


@pytest.mark.parametrize("what", ["residual", "post", "comb", "pre"])
def test_one_row_for_all_tokens(trt, forms, network, refused, what):
    w = forms.Writer(network, forms.Form())
    inputs = w.inputs()
    inputs[what] = network.add_input(f"one_{what}", inputs[what].dtype, (1, *inputs[what].shape[1:]))
    streams, layer_input = w.boundary(**inputs)
    w.output(streams=streams, layer_input=layer_input)
    refused("one_row_for_all")


def test_shape_that_nothing_tells(trt, forms, network, refused):
    w = forms.Writer(network, forms.Form())
    inputs = w.inputs()
    sizes = network.add_shape(network.add_input("like", trt.bfloat16, (-1, -1, 4, forms.HIDDEN))).get_output(0)

    def narrow_in_another_shape(x):
        layer = network.add_shuffle(x)
        layer.set_input(1, sizes)
        return forms.Writer.narrow(w, layer.get_output(0))

    w.narrow = narrow_in_another_shape
    w.output(streams=w.post(w.all_reduce(inputs["x"]), inputs["residual"], inputs["post"], inputs["comb"]))
    refused("shape")


# The collapse and the norm.


def entry_of(writer, inputs, pre=None, **parts):
    """A boundary with some tensors or parts replaced; returns streams and layer input."""
    streams = writer.post(writer.all_reduce(inputs["x"]), inputs["residual"], inputs["post"], inputs["comb"])
    pre = inputs["pre"] if pre is None else pre(streams)
    norm = parts.get("norm", writer.norm)
    gamma = parts.get("gamma", lambda streams: inputs["gamma"])(streams)
    return streams, norm(writer.collapse(streams, pre), gamma)


def test_newly_computed_pre(writer, refused):
    w = writer()
    streams, layer_input = entry_of(w, w.inputs(), pre=lambda streams: means(w, streams))
    w.output(streams=streams, layer_input=layer_input)
    report = refused("newly_computed_pre")
    assert "V4" in report.found[0].reasons[0].what


@pytest.mark.parametrize("coefficients", ["native", "plugin"])
def test_newly_computed_pre_of_the_real_coefficients(trt, network, writer, refused, coefficients):
    from trtllm_mhc.network import functional, plugins

    w = writer()
    rng = np.random.default_rng(0)
    fn = rng.standard_normal((24, 4 * w.form.hidden)).astype(np.float32)
    eps = {"rms_norm_eps": 1e-20, "hc_eps": 1e-6, "post_alpha": 2.0, "sinkhorn_iters": 2}

    def new_pre(streams):
        ones = np.ones(24, np.float32)
        weights = fn, ones[:3], ones
        if coefficients == "native":
            return functional.mhc_coefficients(network, streams, *weights, **eps)[2]
        return plugins.add_coefficients(network, streams, *(functional.constant(network, w) for w in weights), **eps)[2]

    streams, layer_input = entry_of(w, w.inputs(), pre=new_pre)
    w.output(streams=streams, layer_input=layer_input)
    refused("newly_computed_pre")


def test_layer_norm(trt, writer, network, refused):
    from trtllm_mhc.network import ops

    w = writer()

    def layer_norm(collapsed, gamma):
        scale = w.wide(ops.reshape(network, gamma, (1, w.form.hidden)))
        bias = ops.constant(network, np.zeros((1, w.form.hidden), np.float32))
        layer = network.add_normalization(w.wide(collapsed), scale, bias, 1 << 1)
        layer.epsilon = 1e-6
        return w.narrow(ops.output(layer, "normalization"))

    streams, layer_input = entry_of(w, w.inputs(), norm=layer_norm)
    w.output(streams=streams, layer_input=layer_input)
    refused("norm_subtracts_mean")


def test_eps_is_an_input(trt, writer, network, refused):
    w = writer()
    eps = network.add_input("eps", trt.float32, (1, 1))
    w.scalar = lambda value, rank: eps
    streams, layer_input = entry_of(w, w.inputs())
    w.output(streams=streams, layer_input=layer_input)
    refused("eps_not_constant")


@pytest.mark.parametrize("eps", [-1e-6, float("inf"), float("nan")])
def test_eps_out_of_range(forms, network, refused, eps):
    forms.write_boundary(network, forms.Form(eps=eps))
    refused("eps")


@pytest.mark.parametrize("what", ["gamma", "pre"])
def test_dtypes_of_the_entry(trt, forms, network, refused, what):
    from trtllm_mhc.network import ops

    w = forms.Writer(network, forms.Form())
    inputs = w.inputs()
    if what == "gamma":
        inputs["gamma"] = network.add_input("wide_gamma", trt.float32, (forms.HIDDEN,))
    else:
        half = network.add_input("narrow_pre", trt.bfloat16, (-1, 4))
        inputs["pre"] = half
        w.collapse = lambda streams, pre: w.narrow(
            ops.output(network.add_einsum([half, streams], "mi,mih->mh"), "einsum")
        )
    streams, layer_input = w.boundary(**inputs)
    w.output(streams=streams, layer_input=layer_input)
    if what == "gamma":
        refused("dtype")
    else:
        from trtllm_mhc.rewrite import fuse_boundaries

        (entry,) = fuse_boundaries(network).found
        assert (entry.status, [note.code for note in entry.notes]) == ("residual_only", ["collapse_extra_rounding"])


def test_gamma_from_the_streams(trt, writer, refused):
    w = writer()
    streams, layer_input = entry_of(w, w.inputs(), gamma=lambda streams: w.narrow(w.sum(w.sum(w.wide(streams), 1), 0)))
    w.output(streams=streams, layer_input=layer_input)
    refused("gamma_depends")


# The end of a MoE before the all-reduce: left as it is, while the boundary is fused.


@pytest.fixture
def left_out(forms, network):
    """Runs the pass and checks that it fuses the boundary on the finalized tensor, with this one note."""
    from trtllm_mhc.network import plugins
    from trtllm_mhc.rewrite import fuse_boundaries

    def left_out(code, **changes):
        w = forms.Writer(network, forms.Form(finalize="adds"))
        for name, change in changes.items():
            setattr(w, name, change(w, getattr(w, name)))
        streams, layer_input = w.boundary(**w.inputs())
        w.output(streams=streams, layer_input=layer_input)
        (entry,) = fuse_boundaries(network).found
        assert (entry.status, entry.contribution, [note.code for note in entry.notes]) == ("full", "plain", [code])
        assert all(note.what.endswith(".") and note.remedy.endswith(".") for note in entry.notes)
        (layer,) = [each for each in forms.live_layers(network) if plugins.is_plugin_layer(each, plugins.BOUNDARY)]
        assert plugins.read_fields(layer)["top_k"] == 0

    return left_out


@pytest.mark.parametrize("form", ["no mask", "another number", "mask of another index"])
def test_finalize_unmasked(trt, left_out, form):
    def compare(w, plain):
        def changed(a, b, operation):
            if operation == "GREATER":
                if form == "no mask":
                    b = w.number(-2, 2)
                elif form == "another number":
                    b = w.number(0, 2)
                elif form == "mask of another index":
                    a = w.network.add_input("other", trt.int32, a.shape)
            return plain(a, b, operation)

        return changed

    left_out("finalize_unmasked", compare=compare)


def test_finalize_rounded_on_the_way(left_out):
    def add(w, plain):
        # The routed sum is rounded before the shared experts' output is added, as some frameworks do.
        return lambda a, b: plain(a, w.wide(w.narrow(b))) if a is w.shared else plain(a, b)

    left_out("finalize_extra_rounding", add=add, wide=keep)


def test_finalize_without_shared_experts(left_out):
    def add(w, plain):
        return lambda a, b: b if a is w.shared else plain(a, b)

    left_out("finalize_without_shared", add=add, wide=keep)


def keep(w, plain):
    """Remember the shared experts' output."""

    def changed(x):
        result = plain(x)
        if x.name == "shared_output":
            w.shared = result
        return result

    w.shared = None
    return changed


def test_finalized_value_has_another_reader(left_out):
    def finalize(w, plain):
        def changed(**moe):
            result = plain(**moe)
            w.output(other=w.mul(result, result))
            return result

        return changed

    left_out("finalize_consumer", finalize=finalize)


@pytest.mark.parametrize("what", ["shared_output", "gemm2_permuted"])
def test_finalize_of_other_dtypes(trt, left_out, what):
    def finalize(w, plain):
        def changed(**moe):
            moe[what] = w.network.add_input(f"wide_{what}", trt.float32, moe[what].shape)
            return plain(**moe)

        return changed

    left_out("dtype", finalize=finalize)


@pytest.mark.parametrize("what", ["index", "shared_output"])
def test_finalize_with_one_row_for_all_tokens(trt, left_out, what):
    def finalize(w, plain):
        def changed(**moe):
            moe[what] = w.network.add_input(f"one_{what}", moe[what].dtype, (1, moe[what].shape[1]))
            return plain(**moe)

        return changed

    left_out("one_row_for_all", finalize=finalize)


# The linear layer before the all-reduce: left as it is, while the boundary is fused.


@pytest.fixture
def not_published(forms, network):
    """Runs the pass and checks that it fuses the boundary on the linear layer's output, with this one note."""
    from trtllm_mhc.rewrite import FuseOptions, fuse_boundaries

    def not_published(code, form=None, weights="bf16", **changes):
        w = forms.Writer(network, form or forms.Form(linear="transposed"))
        for name, change in changes.items():
            setattr(w, name, change(w, getattr(w, name)))
        streams, layer_input = w.boundary(**w.inputs())
        w.output(streams=streams, layer_input=layer_input)
        (entry,) = fuse_boundaries(network, FuseOptions(publish_linear=weights)).found
        assert (entry.status, entry.contribution, [note.code for note in entry.notes]) == ("full", "plain", [code])
        assert all(note.what.endswith(".") and note.remedy.endswith(".") for note in entry.notes)
        assert "MATRIX_MULTIPLY" in [layer.type.name for layer in forms.live_layers(network)] or not form.linear

    return not_published


def test_publish_without_a_linear_layer(forms, not_published):
    not_published("publish_no_linear", forms.Form())


@pytest.mark.parametrize("what", ["bias", "weight is an input"])
def test_publish_of_no_constant_weight(trt, not_published, forms, what):
    def linear(w, plain):
        def changed(activation):
            if what == "bias":
                return w.add(plain(activation), w.network.add_input("bias", trt.bfloat16, (1, forms.HIDDEN)))
            weight = w.network.add_input("weight", trt.bfloat16, (forms.HIDDEN, w.form.features))
            return w.matmul(activation, "NONE", weight, "TRANSPOSE")

        return changed

    not_published("publish_no_linear", linear=linear)


@pytest.mark.parametrize("features", [64, 16384 + 128])
def test_publish_of_other_sizes(forms, not_published, features):
    not_published("publish_size", forms.Form(linear="transposed", features=features))


def test_publish_of_another_dtype(trt, not_published):
    def linear(w, plain):
        def changed(activation):
            w.wide_weight = True
            return w.narrow(plain(w.wide(activation), w.weight.astype(np.float32)))

        import rewrite_forms

        w.weight = rewrite_forms.linear_weight(w.form)
        return changed

    # The rounding after a product in float32 is the cast's, so that there is no linear layer of bfloat16.
    not_published("publish_no_linear", linear=linear)


@pytest.mark.parametrize("what", ["reader", "output"])
def test_published_value_has_another_reader(not_published, what):
    def linear(w, plain):
        def changed(activation):
            x = plain(activation)
            w.output(other=w.mul(x, x) if what == "reader" else x)
            return x

        return changed

    not_published("publish_consumer", linear=linear)


@pytest.mark.parametrize("what", ["too fine", "not finite"])
def test_publish_of_weights_that_are_not_e4m3(forms, not_published, what):
    import rewrite_forms

    def linear(w, plain):
        weight = rewrite_forms.linear_weight(w.form)
        # Four significant bits are E4M3's, and within a block all are on one grid.
        weight[5, 7] = 17.0 if what == "too fine" else np.inf
        return lambda activation: plain(activation, weight)

    not_published("publish_not_e4m3", weights="e4m3", linear=linear)


def test_publish_where_users_of_the_mailbox_are_unordered(forms, network):
    """Two all-reduces of no boundary that do not wait for each other, though the boundary waits for both."""
    from trtllm_mhc.network import plugins
    from trtllm_mhc.rewrite import FuseOptions, fuse_boundaries

    w = forms.Writer(network, forms.Form(linear="transposed"))
    inputs = w.inputs()
    sums = [
        plugins.add_all_reduce(network, each, tp_size=2)
        for each in (w.linear(inputs["activation"]), w.pick(inputs["residual"], 1, 0, keep=False))
    ]
    waiting = w.mul(w.pick(sums[0], 1, 0), w.pick(sums[1], 1, 0))
    streams, layer_input = w.boundary(**{**inputs, "activation": w.mul(inputs["activation"], waiting)})
    w.output(streams=streams, layer_input=layer_input)
    (entry,) = fuse_boundaries(network, FuseOptions(publish_linear="bf16")).found
    assert (entry.status, entry.contribution) == ("full", "plain")
    assert [note.code for note in entry.notes] == ["publish_unordered"]


def test_a_boundary_between_a_published_one_and_its_linear_layer(trt, forms, network):
    """Of a network that has been through the pass: nobody may come between."""
    from trtllm_mhc.network import functional, plugins
    from trtllm_mhc.rewrite import fuse_boundaries

    w = forms.Writer(network, forms.Form())
    inputs = w.inputs()
    activation = network.add_input("activation", trt.bfloat16, (-1, 128))
    weight = functional.constant(network, forms.linear_weight(forms.Form()))
    published = plugins.add_publish_linear(network, activation, weight, tp_size=2)
    x = w.narrow(w.add(w.wide(inputs["x"]), w.wide(published)))
    streams, layer_input = w.boundary(**{**inputs, "x": x})
    last = plugins.add_boundary(
        network,
        published,
        streams,
        *(inputs[name] for name in ("post", "comb", "pre", "gamma")),
        tp_size=2,
        norm_eps=1e-6,
        published=True,
    )
    w.output(streams=last[0], layer_input=last[1], other=layer_input)
    report = fuse_boundaries(network)
    assert report.already_fused == 1
    assert [[reason.code for reason in entry.reasons] for entry in report.found] == [["unordered"]]


def test_publish_in_a_chain(forms, network):
    from trtllm_mhc.rewrite import FuseOptions, fuse_boundaries

    w = forms.Writer(network, forms.Form(linear="transposed"))
    inputs = w.inputs()
    streams, layer_input = w.boundary(**inputs)
    activation = w.mul(inputs["activation"], w.pick(layer_input, 1, 0))
    streams, layer_input = w.boundary(**{**inputs, "activation": activation, "residual": streams})
    w.output(streams=streams, layer_input=layer_input)
    report = fuse_boundaries(network, FuseOptions(publish_linear="bf16"))
    assert [entry.contribution for entry in report.found] == ["published", "published"]


def test_quantised_layer_input(trt, writer, network):
    """The quantisation stays, and the boundary before it is fused."""
    from trtllm_mhc.network import functional
    from trtllm_mhc.rewrite import fuse_boundaries

    if not hasattr(network, "add_dynamic_quantize") or not hasattr(trt.DataType, "E8M0"):
        pytest.skip(f"TensorRT {trt.__version__} has no MXFP8 dynamic quantisation")
    w = writer()
    streams, layer_input = w.boundary(**w.inputs())
    data, scales = functional.mxfp8_quantize(network, layer_input)
    network.mark_output(data)
    network.mark_output(scales)
    w.output(streams=streams)
    (entry,) = fuse_boundaries(network).found
    assert (entry.status, [note.code for note in entry.notes]) == ("full", ["mxfp8_layout"])


# Several boundaries.


def two_chains(trt, network, forms, cross):
    """Two boundaries on the same inputs, neither of which waits for the other."""
    w = forms.Writer(network, forms.Form())
    inputs = w.inputs()
    streams = []
    for k in range(2):
        x = w.mul(inputs["x"], inputs["x"]) if k else inputs["x"]
        streams.append(w.post(w.all_reduce(x), inputs["residual"], inputs["post"], inputs["comb"]))
    pres = [means(w, each) for each in reversed(streams)] if cross else [inputs["pre"]] * 2
    for k in range(2):
        layer_input = w.norm(w.collapse(streams[k], pres[k]), inputs["gamma"])
        w.output(**{f"streams_{k}": streams[k], f"layer_input_{k}": layer_input})


def test_pre_mixes_of_each_others_streams(trt, network, forms, refused):
    two_chains(trt, network, forms, cross=True)
    refused("cycle", boundaries=2)


def test_independent_chains_on_one_group(trt, network, forms):
    from trtllm_mhc.rewrite import fuse_boundaries

    two_chains(trt, network, forms, cross=False)
    report = fuse_boundaries(network)
    assert [entry.status for entry in report.found] == ["full", "refused"]
    assert [reason.code for reason in report.found[1].reasons] == ["unordered"]


def test_every_reason_is_met_here(trt):
    """Every code in the source is in a test; those of TensorRT-LLM alone are in its integration's."""
    from trtllm_mhc.rewrite import legality

    codes = {
        code
        for path in Path(legality.__file__).parent.glob("*.py")
        for code in re.findall(r'Reason\(\s*"(\w+)"', path.read_text())
    }
    tests = "".join(path.read_text() for path in Path(__file__).parents[1].rglob("test_*.py"))
    assert len(codes) > 20
    assert {code for code in codes if f'"{code}"' not in tests} == set()


def test_post_from_the_sum_itself(trt, forms, network):
    """Even by layers that could belong to the boundary."""
    from trtllm_mhc.rewrite import fuse_boundaries

    w = forms.Writer(network, forms.Form())
    inputs = w.inputs()
    reduced = w.all_reduce(inputs["x"])
    mean = w.sum(w.wide(reduced), 1, keep=True, operation=trt.ReduceOperation.AVG)
    post = w.mul(mean, inputs["post"])
    w.output(streams=w.post(reduced, inputs["residual"], post, inputs["comb"]))
    before = forms.snapshot(network)
    (entry,) = fuse_boundaries(network).found
    assert "own_operand" in [reason.code for reason in entry.reasons]
    assert forms.snapshot(network) == before


def test_one_target_rounded_on_the_way(trt, forms, network, refused):
    """Streams written one by one, of which only the last is rounded twice."""
    from trtllm_mhc.network import ops

    w = forms.Writer(network, forms.Form(post="per_target"))
    inputs = w.inputs()
    add, count = w.add, 0

    def add_and_round_the_last(a, b):
        nonlocal count
        count += 1
        result = add(a, b)
        return w.wide(ops.cast(network, result, trt.bfloat16)) if count == 15 else result

    w.add = add_and_round_the_last
    w.output(streams=w.post(w.all_reduce(inputs["x"]), inputs["residual"], inputs["post"], inputs["comb"]))
    assert count == 16
    refused("extra_rounding")
