# SPDX-License-Identifier: Apache-2.0
"""The model class and the pass on TensorRT-LLM's networks: structure, values, and its books."""

from __future__ import annotations

from collections import OrderedDict
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

BF16 = ml_dtypes.bfloat16


@pytest.fixture
def make(trtllm):
    """Builds a model's network as TensorRT-LLM's `build` does, up to the engine."""
    from tensorrt_llm.builder import Builder
    from tensorrt_llm.graph_rewriting import optimize

    keep = []

    def make(model, *, debug_output=False, user_buffer=False):
        builder = Builder()
        network = builder.create_network()
        if hasattr(network.plugin_config, "dtype"):
            network.plugin_config.dtype = "bfloat16"
        network.plugin_config.user_buffer = user_buffer
        network.plugin_config.set_nccl_plugin("bfloat16" if model.config.mapping.world_size > 1 else None)
        with trtllm.net_guard(network):
            network.set_named_parameters(model.named_parameters())
            inputs = model.prepare_inputs(
                max_batch_size=8, max_input_len=8, max_seq_len=16, max_num_tokens=16, use_cache=True, opt_num_tokens=8
            )
            model(**inputs)
            if debug_output:
                for name, tensor in model.named_network_outputs():
                    network._mark_output(tensor, name, tensor.dtype)
        optimize(network)
        keep.append((builder, model))
        return network

    return make


@pytest.fixture
def models(integration, checkpoint):
    """The model class's two ranks."""
    from tensorrt_llm.models import PretrainedConfig

    def load(rank):
        config = PretrainedConfig.from_json_file(str(checkpoint / "config.json"))
        config.set_rank(rank)
        return integration.DeepseekV41ForCausalLM.from_checkpoint(str(checkpoint), config=config)

    return [load(rank) for rank in (0, 1)]


@pytest.fixture
def unfused(monkeypatch):
    monkeypatch.setenv("TRTLLM_MHC_FUSE", "0")


def live_types(network):
    """What the outputs depend on: layer types, and for this project's plugins their names."""
    from trtllm_mhc.network.layers import layer_type

    definition = network.trt_network
    producers = {}
    for index in range(definition.num_layers):
        layer = definition.get_layer(index)
        producers |= {layer.get_output(k): layer for k in range(layer.num_outputs)}
    found, stack = {}, [definition.get_output(k) for k in range(definition.num_outputs)]
    while stack:
        layer = producers.get(stack.pop())
        if layer is not None and id(layer) not in found:
            found[id(layer)] = layer
            stack += [layer.get_input(k) for k in range(layer.num_inputs) if layer.get_input(k) is not None]
    ours = {id(layer) for layer in boundaries(network)}
    return ["MhcBoundary" if id(layer) in ours else str(layer_type(layer)).split(".")[-1] for layer in found.values()]


def boundaries(network):
    from trtllm_mhc.network import plugins

    definition = network.trt_network
    layers = [definition.get_layer(k) for k in range(definition.num_layers)]
    return [layer for layer in layers if plugins.is_plugin_layer(layer, plugins.BOUNDARY)]


def test_every_all_reduce_of_the_model_becomes_a_boundary(models, config, make):
    from trtllm_mhc.network import plugins

    for rank, model in enumerate(models):
        network = make(model)
        types = live_types(network)
        assert types.count("MhcBoundary") == config.boundaries == len(boundaries(network))
        assert "PLUGIN_V2" not in types
        fields = plugins.read_fields(boundaries(network)[0])
        assert (fields["tp_size"], fields["rank"], fields["group"]) == (2, rank, ())
        inputs = [network.trt_network.get_input(k).name for k in range(network.trt_network.num_inputs)]
        assert inputs == ["embeddings", "all_reduce_workspace"]
        assert [network.trt_network.get_output(k).name for k in range(network.trt_network.num_outputs)] == [
            "hidden_states"
        ]


def test_unfused_as_asked(models, config, make, unfused):
    types = live_types(make(models[0]))
    assert (types.count("PLUGIN_V2"), types.count("MhcBoundary")) == (config.boundaries, 0)


def test_values_are_those_of_the_network_without_tensorrt_llm(trt, builder, models, config, make):
    """The same weights through this project's own network definition, fused too: the same bits."""
    from trtllm_mhc.models.deepseek_v41 import ModelWeights, build_boundary_stack
    from trtllm_mhc.network import CommunicatorSpec
    from trtllm_mhc.reference import bits_equal, interpreter
    from trtllm_mhc.rewrite import fuse_boundaries

    flags = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    plain = [builder.create_network(flags) for _ in range(2)]
    weights = ModelWeights(config, seed=5)
    for rank, network in enumerate(plain):
        build_boundary_stack(network, config, weights, CommunicatorSpec(2), rank=rank, coefficients="plugin")
        fuse_boundaries(network)
    x = np.random.default_rng(1).normal(0, 1, (3, config.hidden_size)).astype(BF16)
    ours = [make(model).trt_network for model in models]
    feed = {"embeddings": x, "all_reduce_workspace": np.zeros(17, np.int64)}
    got = interpreter.evaluate(ours, [feed, feed])
    expected = interpreter.evaluate(plain, [{"embeddings": x}] * 2)
    for rank in range(2):
        assert np.abs(got[rank]["hidden_states"].astype(np.float32)).max() > 0.1
        assert bits_equal(got[rank]["hidden_states"], expected[rank]["hidden_states"]).all()


def test_books_of_the_network(models, make):
    from tensorrt_llm.network import get_plugin_info

    network = make(models[1])
    assert network.is_graph_altered
    layers = list(network.get_layers())
    removed = [layer for layer in layers if layer.is_removed()]
    assert {"PLUGIN_V2"} <= {str(layer.trt_layer.type).split(".")[-1] for layer in removed}
    for layer in removed:
        assert get_plugin_info(network.trt_network, layer.name) is None
        assert not any(list(tensor.get_users()) for tensor in layer.get_outputs() if not _all_removed(network, tensor))
    for layer in boundaries(network):
        info = get_plugin_info(network.trt_network, layer.name)
        assert (info.plugin_name, info.plugin_creator.name) == ("MhcBoundary", "MhcBoundary")
        assert info.pfc_as_list["tp_size"] == [2]
        assert info.pfc_as_list["rank"] == [1]
        assert layer.metadata == layer.name


def _all_removed(network, tensor):
    return all(user.is_removed() for user in tensor.get_users())


@pytest.fixture
def one_boundary(trtllm):
    """A model class of somebody else: one linear, one boundary, and modules that register debug outputs."""
    from tensorrt_llm.functional import Tensor
    from tensorrt_llm.layers import RowLinear
    from tensorrt_llm.models import PretrainedModel
    from tensorrt_llm.plugin import current_all_reduce_helper

    from trtllm_mhc.network import functional

    hidden, wide = 4096, 64

    class OneBoundary(PretrainedModel):
        def __init__(self, config):
            super().__init__(config)
            mapping = config.mapping
            self.proj = RowLinear(
                wide, hidden, bias=False, dtype="bfloat16", tp_group=mapping.tp_group, tp_size=mapping.tp_size
            )
            shape = (hidden, wide // mapping.tp_size)
            self.proj.weight.value = np.zeros(shape, BF16).view(trtllm._utils.np_bfloat16)
            self.register = ()

        def prepare_inputs(self, **unused):
            def tensor(name, dtype, *sizes):
                ranges = OrderedDict(
                    [(f"{name}_rows", [[1, 8, 16]]), *((f"{name}_{k}", [s]) for k, s in enumerate(sizes))]
                )
                return Tensor(name=name, dtype=dtype, shape=[-1, *sizes], dim_range=ranges)

            inputs = {
                "x": tensor("x", "bfloat16", wide // self.config.mapping.tp_size),
                "residual": tensor("residual", "bfloat16", 4, hidden),
                "post": tensor("post", "float32", 4),
                "comb": tensor("comb", "float32", 4, 4),
                "pre": tensor("pre", "float32", 4),
            }
            if self.config.mapping.tp_size > 1:
                current_all_reduce_helper().set_workspace_tensor(self.config.mapping, 1)
            return inputs

        def forward(self, x, residual, post, comb, pre):
            net = trtllm.default_net()
            reduced = self.proj(x)
            args = [each.trt_tensor for each in (reduced, residual, post, comb)]
            streams = functional.mhc_post(net.trt_network, *args)
            gamma = np.ones(hidden, BF16)
            layer_input = functional.mhc_pre_delayed(net.trt_network, streams, pre.trt_tensor, gamma, 1e-6)
            wrap = {
                "reduced": reduced,
                "streams": Tensor(trt_tensor=streams, network=net, is_network_input=False),
                "layer_input": Tensor(trt_tensor=layer_input, network=net, is_network_input=False),
            }
            for name in self.register:
                self.proj.register_network_output(name, wrap[name])
            after = functional.cast(net.trt_network, layer_input, trtllm._utils.str_dtype_to_trt("float32"))
            Tensor(trt_tensor=after, network=net, is_network_input=False).mark_output("out")

    def make_class(decorate):
        return decorate(type("OneBoundaryOnce", (OneBoundary,), {"forward": OneBoundary.forward}))

    return make_class


@pytest.fixture
def small_config(trtllm):
    from tensorrt_llm import Mapping
    from tensorrt_llm.models import PretrainedConfig

    def config(tp_size=2, rank=0, world_size=None):
        return PretrainedConfig(
            architecture="OneBoundary",
            dtype="bfloat16",
            hidden_size=4096,
            num_hidden_layers=1,
            num_attention_heads=32,
            mapping=Mapping(
                world_size=world_size or tp_size, rank=rank, tp_size=tp_size, pp_size=(world_size or tp_size) // tp_size
            ),
        )

    return config


@pytest.mark.parametrize("register", [(), ("streams", "layer_input")])
def test_any_model_with_debug_outputs(one_boundary, small_config, make, integration, register):
    """Outputs that modules register are marked after `forward`, hence after the pass: they must be the fused ones."""
    model = one_boundary(integration.fuse_on_build)(small_config())
    model.register = register
    network = make(model, debug_output=True)
    assert live_types(network).count("MhcBoundary") == 1
    assert "PLUGIN_V2" not in live_types(network)
    assert network.trt_network.num_outputs == 1 + len(register)


def test_a_debug_output_inside_a_boundary_keeps_its_layers(one_boundary, small_config, make, integration):
    model = one_boundary(integration.fuse_on_build)(small_config())
    model.register = ("reduced",)
    types = live_types(make(model, debug_output=True))
    assert (types.count("MhcBoundary"), types.count("PLUGIN_V2")) == (1, 1)


def test_second_group_of_a_larger_world(one_boundary, small_config, make, integration):
    from trtllm_mhc.network import plugins

    model = one_boundary(integration.fuse_on_build)(small_config(rank=3, world_size=4))
    (layer,) = boundaries(make(model))
    fields = plugins.read_fields(layer)
    assert (fields["group"], fields["rank"]) == ((2, 3), 1)


def test_user_buffers_are_refused_with_the_reason(one_boundary, small_config, make, integration, monkeypatch):
    """Their all-reduce's input is an output of the network, whose memory TensorRT-LLM's runtime provides."""
    reports = _spy(monkeypatch)
    network = make(one_boundary(integration.fuse_on_build)(small_config()), user_buffer=True)
    (entry,) = reports[0].found
    assert [reason.code for reason in entry.reasons] == ["user_buffer"]
    assert "user_buffer" in entry.reasons[0].remedy
    assert "PLUGIN_V2" in live_types(network)


def test_one_rank_has_nothing_to_fuse(one_boundary, small_config, make, integration, monkeypatch):
    reports = _spy(monkeypatch)
    network = make(one_boundary(integration.fuse_on_build)(small_config(tp_size=1)))
    assert (reports[0].found, reports[0].other_all_reduces) == ((), ())
    assert boundaries(network) == []


def test_a_group_that_the_plugin_lacks(one_boundary, small_config, make, integration, monkeypatch):
    reports = _spy(monkeypatch)
    make(one_boundary(integration.fuse_on_build)(small_config(tp_size=16)))
    assert [reason.code for reason in reports[0].found[0].reasons] == ["tp_size"]


def test_decorated_classes_of_one_family_run_the_pass_once(one_boundary, small_config, make, integration, monkeypatch):
    reports = _spy(monkeypatch)
    base = one_boundary(integration.fuse_on_build)
    assert integration.fuse_on_build(base) is base

    @integration.fuse_on_build
    class Derived(base):
        def forward(self, **inputs):
            return super().forward(**inputs)

    make(Derived(small_config()))
    assert len(reports) == 1
    make(base(small_config()))
    assert len(reports) == 2


def test_the_pass_after_the_stock_one_and_again(one_boundary, small_config, make, integration):
    """Builds that do not go through a model class may run them in any order."""
    from tensorrt_llm.graph_rewriting import optimize

    config = small_config()
    network = make(one_boundary(lambda each: each)(config))
    assert boundaries(network) == []
    assert len(integration.fuse_network(network, config.mapping).fused) == 1
    optimize(network)
    again = integration.fuse_network(network, config.mapping)
    assert (again.found, again.already_fused) == ((), 1)
    assert len(boundaries(network)) == 1


def test_weakly_typed_networks_are_refused(integration):
    with pytest.raises(ValueError, match="strongly typed"):
        integration.fuse_network(SimpleNamespace(strongly_typed=False), None)


def test_required_boundaries(models, make, integration, monkeypatch):
    monkeypatch.setenv("TRTLLM_MHC_REQUIRE", "7")
    with pytest.raises(integration.FusionError, match="expected 7 fused boundaries, got 6 of 6"):
        make(models[0])


def test_generated_weights_without_a_checkpoint(integration, checkpoint, make):
    """`trtllm-build --model_config config.json` has no weights; every rank then takes the same seed's."""
    from tensorrt_llm.models import PretrainedConfig

    config = PretrainedConfig.from_json_file(str(checkpoint / "config.json"))
    assert len(boundaries(make(integration.DeepseekV41ForCausalLM(config)))) == 6


def test_checkpoints_are_verified(integration, checkpoint, config):
    from trtllm_mhc.models import safetensors
    from trtllm_mhc.models.deepseek_v41.checkpoint import CheckpointError

    tensors = safetensors.load(checkpoint / "rank0.safetensors")
    name = "layers.1.engram.key"
    (checkpoint / "rank0.safetensors").unlink()
    safetensors.save(checkpoint / "rank0.safetensors", {key: value for key, value in tensors.items() if key != name})
    with pytest.raises(CheckpointError, match=f"{name}: expected bfloat16 \\[1, 1, 4096\\], is missing"):
        integration.DeepseekV41ForCausalLM.from_checkpoint(str(checkpoint), rank=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "float16"}, "dtype: expected 'bfloat16', got 'float16'"),
        ({"mapping": {"world_size": 4, "tp_size": 2, "pp_size": 2}}, "tensor parallelism alone"),
        ({"quantization": {"quant_algo": "FP8"}}, "quantization: expected none"),
    ],
)
def test_configs_that_the_model_has_no_form_for(integration, config, change, message):
    from tensorrt_llm.models import PretrainedConfig

    from trtllm_mhc.models.deepseek_v41.checkpoint import pretrained_config

    with pytest.raises(ValueError, match=message):
        PretrainedConfig.from_dict(pretrained_config(config, 2) | change)


def _spy(monkeypatch):
    from trtllm_mhc.integrations.tensorrt_llm import hook

    reports = []
    monkeypatch.setattr(hook, "_log", lambda rank, report: reports.append(report))
    return reports
