# SPDX-License-Identifier: Apache-2.0
"""TensorRT-LLM's AllReduce plugin: a V2 layer that is known by its type, namespace and number of outputs alone."""

from __future__ import annotations

import numpy as np
import pytest


@pytest.fixture
def all_reduce(trt, all_reduce_v2, network):
    """Adds the layer: with the workspace input or without, with one output or two, in one namespace or another."""
    from trtllm_mhc.network.layers import downcast

    def add(x, workspace=True, outputs=1, namespace="tensorrt_llm"):
        creators = [c for c in all_reduce_v2.all_creators if (c.name, c.plugin_namespace) == ("AllReduce", namespace)]
        field = trt.PluginField("outputs", np.array([outputs, 0], np.int32), trt.PluginFieldType.INT32)
        plugin = creators[0].create_plugin("AllReduce", trt.PluginFieldCollection([field]))
        inputs = [x]
        if workspace:
            inputs.append(network.add_input("all_reduce_workspace", trt.int64, (17,)))
        layer = network.add_plugin_v2(inputs, plugin)
        assert downcast(layer).num_outputs == outputs
        return layer.get_output(0)

    return add


@pytest.fixture
def boundary(network, all_reduce):
    """A boundary around the layer."""
    import rewrite_forms

    def write(**options):
        writer = rewrite_forms.Writer(network, rewrite_forms.Form())
        writer.all_reduce = lambda x: all_reduce(x, **options)
        streams, layer_input = writer.boundary(**writer.inputs())
        writer.output(streams=streams, layer_input=layer_input)
        return rewrite_forms

    return write


@pytest.mark.parametrize("workspace", [True, False])
def test_fused_with_the_group_of_the_options(trt, boundary, network, workspace):
    from trtllm_mhc.network import plugins
    from trtllm_mhc.rewrite import FuseOptions, fuse_boundaries

    forms = boundary(workspace=workspace)
    report = fuse_boundaries(network, FuseOptions(tp_size=2, group=(2, 3), rank=1))
    (entry,) = report.found
    assert (entry.status, entry.form, entry.tp_size) == ("full", "AllReduce", 2)
    assert any("rank order" in text for text in entry.exactness)
    types = [layer.type for layer in forms.live_layers(network)]
    assert types == [trt.LayerType.PLUGIN_V3]
    fields = plugins.read_fields(forms.live_layers(network)[0])
    assert (fields["tp_size"], fields["group"], fields["rank"]) == (2, (2, 3), 1)
    # Its runtimes go on feeding the workspace, which the engine keeps as an unused input.
    names = [network.get_input(k).name for k in range(network.num_inputs)]
    assert ("all_reduce_workspace" in names) == workspace


def test_group_must_be_told(boundary, network):
    from trtllm_mhc.rewrite import fuse_boundaries

    forms = boundary()
    before = forms.snapshot(network)
    (entry,) = fuse_boundaries(network).found
    assert [reason.code for reason in entry.reasons] == ["group_unknown"]
    assert forms.snapshot(network) == before


def test_group_of_a_size_that_the_plugin_lacks(boundary, network):
    from trtllm_mhc.rewrite import FuseOptions, fuse_boundaries

    boundary()
    (entry,) = fuse_boundaries(network, FuseOptions(group=(0, 1, 2))).found
    assert [reason.code for reason in entry.reasons] == ["tp_size"]


@pytest.mark.parametrize("options", [{"outputs": 2}, {"namespace": "somebody_else"}])
def test_others_are_left_alone(boundary, network, options):
    from trtllm_mhc.rewrite import FuseOptions, fuse_boundaries

    boundary(**options)
    report = fuse_boundaries(network, FuseOptions(tp_size=2))
    assert (report.found, report.other_all_reduces) == ((), ())
