# SPDX-License-Identifier: Apache-2.0
"""Boundaries as TensorRT's ONNX parser makes them of the operators that exporters use."""

from __future__ import annotations

import pytest

from trtllm_mhc.reference import assert_bits_equal, ulp_distance

onnx_forms = pytest.importorskip("onnx_forms", reason="onnx is not installed", exc_type=ImportError)


@pytest.mark.parametrize("lead", [("M",), ("B", "S")], ids=["rows", "batch_sequence"])
# The parser computes an Expand's strides from sizes that are known at run time; test_rewrite_onnx.py has that form.
@pytest.mark.parametrize(
    ("post_form", "collapse_form", "norm_form"), [forms for forms in onnx_forms.FORMS if forms[0] != "expand"]
)
def test_fused_and_equal(trt, parse, lead, post_form, collapse_form, norm_form):
    import rewrite_forms

    from trtllm_mhc.reference.interpreter import evaluate
    from trtllm_mhc.rewrite import fuse_boundaries

    m = onnx_forms.Model(lead)
    streams = onnx_forms.post(m, post_form, m.all_reduce("x"))
    layer_input = onnx_forms.norm(m, norm_form, onnx_forms.collapse(m, collapse_form, streams))
    model = m.build({"streams": streams, "layer_input": layer_input})
    unfused, fused = [parse(model) for _ in range(2)], [parse(model) for _ in range(2)]
    reports = [fuse_boundaries(network) for network in fused]
    assert [(report.full, report.refused) for report in reports] == [(1, ())] * 2
    feeds = rewrite_forms.feeds(rewrite_forms.Form(batch="rows" if len(lead) == 1 else "batch_sequence"))
    before, after = evaluate(unfused, feeds), evaluate(fused, feeds)
    for old, new in zip(before, after, strict=True):
        assert_bits_equal(new["streams"], old["streams"], "streams")
        bound = 2 if norm_form == "operator_narrow" else 1
        assert ulp_distance(new["layer_input"], old["layer_input"]).max() <= bound
    types = [layer.type for layer in rewrite_forms.live_layers(fused[0])]
    assert types.count(trt.LayerType.PLUGIN_V3) == 1
