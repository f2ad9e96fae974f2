# SPDX-License-Identifier: Apache-2.0
"""Every form of a boundary is recognised, and its fused network computes what it computed before."""

from __future__ import annotations

import numpy as np
import pytest

from trtllm_mhc.reference import assert_bits_equal, ulp_distance


@pytest.fixture
def forms(trt):
    import rewrite_forms

    return rewrite_forms


@pytest.fixture
def networks(trt, builder):
    flags = 0
    if hasattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED"):
        flags = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    return lambda count: [builder.create_network(flags) for _ in range(count)]


@pytest.fixture
def check(trt, forms, networks):
    """Builds a form twice, fuses one, and compares; returns the report's entry."""
    from trtllm_mhc.reference.interpreter import evaluate
    from trtllm_mhc.rewrite import fuse_boundaries

    def check(form, options=None, status="full", norm_ulps=1):
        unfused, fused = networks(form.tp_size), networks(form.tp_size)
        for network in unfused + fused:
            forms.write_boundary(network, form)
        reports = [fuse_boundaries(network, options) for network in fused]
        (entry,) = reports[0].found
        assert (entry.status, entry.reasons) == (status, ())
        assert all(report == reports[0] for report in reports)
        before, after = evaluate(unfused, forms.feeds(form)), evaluate(fused, forms.feeds(form))
        for old, new in zip(before, after, strict=True):
            assert list(new) == ["streams", "layer_input"]
            assert_bits_equal(new["streams"], old["streams"], "streams")
            assert np.abs(old["streams"].astype(np.float32)).max() > 10
            assert ulp_distance(new["layer_input"], old["layer_input"]).max() <= norm_ulps
        types = [layer.type for layer in forms.live_layers(fused[0])]
        assert types.count(trt.LayerType.PLUGIN_V3) == (1 if entry.contribution != "published" else 2)
        if status == "full":
            around = {trt.LayerType.SHUFFLE}
            if entry.contribution == "published":
                around.add(trt.LayerType.CONSTANT)
            if form.batch == "batch_sequence":
                around |= {
                    getattr(trt.LayerType, kind) for kind in ("SHAPE", "SLICE", "CONCATENATION", "CONSTANT", "CAST")
                }
            assert set(types) <= {trt.LayerType.PLUGIN_V3} | around
            assert form.batch != "rows" or len(types) <= 2 or form.finalize or form.linear
        return entry

    return check


@pytest.mark.parametrize(
    "post", ["reduce", "einsum", "matmul", "matmul_wide", "adds", "per_target", "squeeze", "repeat"]
)
@pytest.mark.parametrize("comb", ["source_target", "target_source"])
def test_post(check, forms, post, comb):
    check(forms.Form(post=post, comb=comb))


@pytest.mark.parametrize("collapse", ["reduce", "einsum", "matmul", "matmul_column", "matmul_vector", "mean"])
def test_collapse(check, forms, collapse):
    check(forms.Form(collapse=collapse))


def test_collapse_by_adds_is_left_out(check, forms):
    entry = check(forms.Form(collapse="adds"), status="residual_only", norm_ulps=0)
    assert [note.code for note in entry.notes] == ["collapse_rounds_separately"]


def test_collapse_by_adds_on_request(check, forms):
    from trtllm_mhc.rewrite import FuseOptions

    check(forms.Form(collapse="adds"), FuseOptions(separate_collapse="fuse"))


@pytest.mark.parametrize(
    "norm", ["recip_sqrt", "pow", "div_sqrt", "one_over", "sum_div", "sum_mul", "pow_square", "gamma_first"]
)
def test_norm(check, forms, norm):
    check(forms.Form(norm=norm))


def test_norm_scaled_after_rounding(check, forms):
    entry = check(forms.Form(norm="scale_after"), norm_ulps=2)
    assert any("2 bfloat16 ulp" in text for text in entry.exactness)


@pytest.mark.parametrize("batch", ["rows", "batch_sequence", "one_batch", "static"])
@pytest.mark.parametrize("post", ["reduce", "einsum", "matmul", "adds"])
def test_batch(check, forms, batch, post):
    check(forms.Form(batch=batch, post=post, collapse="einsum" if post == "einsum" else "reduce"))


@pytest.mark.parametrize("hidden", [4096, 5120, 7168])
def test_hidden_sizes(check, forms, hidden):
    assert check(forms.Form(hidden=hidden)).hidden == hidden


@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
def test_tp_sizes(check, forms, tp_size):
    assert check(forms.Form(tp_size=tp_size)).tp_size == tp_size


@pytest.mark.parametrize("eps", [0.0, 1e-20, 1e-6])
def test_eps_reaches_the_plugin(check, forms, networks, eps):
    from trtllm_mhc.network import plugins
    from trtllm_mhc.rewrite import fuse_boundaries

    (network,) = networks(1)
    forms.write_boundary(network, forms.Form(eps=eps))
    fuse_boundaries(network)
    (layer,) = [each for each in forms.live_layers(network) if plugins.is_plugin_layer(each, plugins.BOUNDARY)]
    assert layer.name == "mhc_boundary_0"
    assert np.float32(plugins.read_fields(layer)["norm_eps"]) == np.float32(eps)


@pytest.mark.parametrize("batch", ["rows", "batch_sequence"])
def test_dist_collective(trt, check, forms, batch):
    if not hasattr(trt, "IDistCollectiveLayer"):
        pytest.skip(f"TensorRT {trt.__version__} has no DIST_COLLECTIVE layer")
    assert check(forms.Form(all_reduce="dist_collective", batch=batch)).form == "DistCollective"


@pytest.mark.parametrize(
    ("finalize", "batch"),
    [
        *((form, "rows") for form in ("adds", "reduce", "einsum", "matmul", "shared_first", "reversed", "rows_masked")),
        *((form, "rows") for form in ("rows_masked_narrow", "weights_masked", "weights_multiplied", "columns")),
        *((form, "rows") for form in ("not_less", "not_equal", "chosen_index")),
        *(("adds", batch) for batch in ("batch_sequence", "one_batch", "static")),
    ],
)
def test_finalize(check, forms, finalize, batch):
    entry = check(forms.Form(finalize=finalize, batch=batch))
    assert entry.contribution == "finalize"
    assert any(text.startswith("MoE output: ") for text in entry.exactness)


@pytest.mark.parametrize("weights", ["bf16", "e4m3"])
@pytest.mark.parametrize("linear", ["transposed", "columns", "reshaped_weight"])
@pytest.mark.parametrize("batch", ["rows", "batch_sequence", "one_batch"])
def test_linear(check, forms, linear, weights, batch):
    from trtllm_mhc.rewrite import FuseOptions

    entry = check(forms.Form(linear=linear, batch=batch), FuseOptions(publish_linear=weights))
    assert (entry.contribution, entry.notes) == ("published", ())
    assert any(text.startswith("linear layer: ") for text in entry.exactness)


def test_linear_by_default(forms, network):
    from trtllm_mhc.rewrite import fuse_boundaries

    forms.write_boundary(network, forms.Form(linear="transposed"))
    (entry,) = fuse_boundaries(network).found
    assert (entry.status, entry.contribution, entry.notes) == ("full", "plain", ())
    assert "MATRIX_MULTIPLY" in [layer.type.name for layer in forms.live_layers(network)]


@pytest.mark.parametrize("weights", ["bf16", "e4m3"])
def test_attributes_of_a_published_boundary(forms, network, weights):
    from trtllm_mhc.network import plugins
    from trtllm_mhc.rewrite import FuseOptions, fuse_boundaries

    forms.write_boundary(network, forms.Form(linear="transposed"))
    options = FuseOptions(publish_linear=weights)
    assert fuse_boundaries(network, options).full == 1
    layers = {layer.name: layer for layer in forms.live_layers(network)}
    boundary, linear = layers["mhc_boundary_0"], layers["mhc_boundary_0/linear"]
    assert boundary.get_input(0) is linear.get_output(0)
    assert plugins.read_fields(boundary)["published"] == 1
    assert plugins.read_fields(linear)["weight_type"] == int(weights == "e4m3")
    again = fuse_boundaries(network, options)
    assert (again.found, again.other_all_reduces, again.already_fused) == ((), (), 1)


def test_finalize_switched_off(trt, forms, network):
    from trtllm_mhc.rewrite import FuseOptions, fuse_boundaries

    forms.write_boundary(network, forms.Form(finalize="adds"))
    (entry,) = fuse_boundaries(network, FuseOptions(finalize=False)).found
    assert (entry.status, entry.contribution, entry.notes) == ("full", "plain", ())
    assert "GATHER" in [layer.type.name for layer in forms.live_layers(network)]


def test_functional_finalize(trt, forms, networks):
    """The form that this project's own layers have."""
    from trtllm_mhc.network import functional, plugins
    from trtllm_mhc.rewrite import fuse_boundaries

    (network,) = networks(1)
    w = forms.Writer(network, forms.Form(finalize="adds"))
    w.finalize = lambda **moe: functional.moe_finalize(
        network, *(moe[name] for name in ("gemm2_permuted", "expert_weights", "index", "shared_output"))
    )
    inputs = w.inputs()
    streams, layer_input = w.boundary(**inputs)
    w.output(streams=streams, layer_input=layer_input)
    assert fuse_boundaries(network).found[0].contribution == "finalize"
    (layer,) = [each for each in forms.live_layers(network) if plugins.is_plugin_layer(each, plugins.BOUNDARY)]
    assert plugins.read_fields(layer)["top_k"] == forms.TOP_K
    assert [layer.get_input(k).name for k in range(4)] == list(inputs)[-4:]


def test_document_is_up_to_date(forms, builder):
    import forms_table

    described = {(part, form) for part, each in forms_table.FORMS.items() for form in each}
    written = {"post": forms.POSTS, "collapse": forms.COLLAPSES, "norm": forms.NORMS, "batch": forms.BATCHES}
    written |= {"finalize": forms.FINALIZES, "linear": forms.LINEARS}
    assert {(part, form) for part, each in written.items() for form in each} == {
        pair for pair in described if pair[0] != "comb"
    }
    assert forms_table.PATH.read_text() == forms_table.render(builder)
