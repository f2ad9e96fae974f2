# SPDX-License-Identifier: Apache-2.0
import json
import os
from dataclasses import asdict, dataclass

import tensorrt as trt

from ._utils import str_dtype_to_trt
from .graph_rewriting import optimize
from .network import Network, net_guard


@dataclass
class BuildConfig:
    max_batch_size: int = 2048
    max_num_tokens: int = 8192
    opt_num_tokens: int | None = None
    enable_debug_output: bool = False
    dry_run: bool = False
    profiling_verbosity: str = "layer_names_only"


class Builder:
    _logger = None

    def __init__(self):
        Builder._logger = Builder._logger or trt.Logger(trt.Logger.ERROR)
        self._trt_builder = trt.Builder(Builder._logger)

    @property
    def trt_builder(self):
        return self._trt_builder

    def create_network(self):
        flags = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
        return Network()._init(self._trt_builder.create_network(flags))

    def build_engine(self, network, builder_config, managed_weights=None):
        profile = self._trt_builder.create_optimization_profile()
        for name, tensor in network._inputs.items():
            profile.set_shape(name, *tensor.profiles[0])
        builder_config.add_optimization_profile(profile)
        engine = self._trt_builder.build_serialized_network(network.trt_network, builder_config)
        assert engine is not None, "Engine building failed"
        return engine


class Engine:
    def __init__(self, config, engine):
        self.config = config
        self.engine = engine

    def save(self, engine_dir):
        os.makedirs(engine_dir, exist_ok=True)
        rank = self.config["rank"]
        if rank == 0:
            with open(os.path.join(engine_dir, "config.json"), "w") as file:
                json.dump(self.config, file)
        if self.engine is not None:
            with open(os.path.join(engine_dir, f"rank{rank}.engine"), "wb") as file:
                file.write(self.engine)


def build(model, build_config):
    builder = Builder()
    network = builder.create_network()
    network.plugin_config.set_nccl_plugin(model.config.dtype if model.config.mapping.world_size > 1 else None)
    with net_guard(network):
        network.set_named_parameters(model.named_parameters())
        inputs = model.prepare_inputs(
            max_batch_size=build_config.max_batch_size,
            max_input_len=1024,
            max_seq_len=2048,
            use_cache=True,
            max_beam_width=1,
            max_num_tokens=build_config.max_num_tokens,
            opt_num_tokens=build_config.opt_num_tokens,
            prompt_embedding_table_size=0,
            max_draft_len=0,
            speculative_decoding_draft_tokens_external=False,
            gather_context_logits=False,
            lora_target_modules=[],
        )
        model(**inputs)
        if build_config.enable_debug_output:
            for name, tensor in model.named_network_outputs():
                network._mark_output(tensor, name, str_dtype_to_trt(model.config.dtype))
    optimize(network)
    engine = None
    if not build_config.dry_run:
        builder_config = builder.trt_builder.create_builder_config()
        if build_config.profiling_verbosity == "detailed":
            builder_config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
        engine = builder.build_engine(network, builder_config)
    pretrained = model.config.to_dict()
    config = {"version": "0+double", "rank": model.config.mapping.rank, "pretrained_config": pretrained}
    return Engine(config | {"build_config": asdict(build_config)}, engine)
