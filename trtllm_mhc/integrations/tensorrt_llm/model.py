# SPDX-License-Identifier: Apache-2.0
"""DeepSeek V4.1 as a model class of TensorRT-LLM's TensorRT backend.

It is the boundary stack with TensorRT-LLM's `RowLinear`, and hence its AllReduce, at the end of every sublayer. The
pass of this project then replaces each AllReduce and what follows it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import tensorrt as trt
from tensorrt_llm import Module, Parameter, default_net, default_trtnet
from tensorrt_llm._utils import str_dtype_to_np
from tensorrt_llm.functional import Tensor
from tensorrt_llm.layers import RowLinear
from tensorrt_llm.models import MODEL_MAP, PretrainedConfig, PretrainedModel
from tensorrt_llm.module import ModuleList
from tensorrt_llm.plugin import current_all_reduce_helper

from trtllm_mhc.integrations.tensorrt_llm.hook import fuse_on_build
from trtllm_mhc.models.architectures import DEEPSEEK_V41
from trtllm_mhc.models.deepseek_v41 import DeepseekV41Config, ModelWeights
from trtllm_mhc.models.deepseek_v41 import checkpoint as checkpoints
from trtllm_mhc.models.deepseek_v41.stack import SublayerStandIns, layer_loop
from trtllm_mhc.network.boundaries import Boundaries, BoundaryState, CommunicatorSpec, Step
from trtllm_mhc.network.functional import mhc_post
from trtllm_mhc.network.ops import Array


class DeepseekV41PretrainedConfig(PretrainedConfig):  # type: ignore[misc]
    """TensorRT-LLM's config with the dimensions of V4.1's boundaries; see `DeepseekV41Config` for what they mean.

    Raises:
        ValueError: another dtype than bfloat16, quantisation, or parallelism other than tensor-parallel.
    """

    def __init__(
        self,
        *,
        o_groups: int,
        o_lora_rank: int,
        mlp_size: int,
        hc_mult: int,
        hc_eps: float,
        hc_sinkhorn_iters: int,
        hc_post_alpha: float,
        rms_norm_eps: float,
        engram_layers: Sequence[int],
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.o_groups = o_groups
        self.o_lora_rank = o_lora_rank
        self.mlp_size = mlp_size
        self.hc_mult = hc_mult
        self.hc_eps = hc_eps
        self.hc_sinkhorn_iters = hc_sinkhorn_iters
        self.hc_post_alpha = hc_post_alpha
        self.rms_norm_eps = rms_norm_eps
        self.engram_layers = list(engram_layers)
        mapping = self.mapping
        if self.dtype != "bfloat16":
            raise ValueError(f"dtype: expected 'bfloat16', got {self.dtype!r}")
        if self.quantization.quant_algo is not None or self.quantization.kv_cache_quant_algo is not None:
            raise ValueError(f"quantization: expected none, got {self.quantization.quant_algo}")
        if mapping.world_size != mapping.tp_size:
            raise ValueError(
                f"mapping: expected tensor parallelism alone, got {mapping.world_size} ranks with tp_size "
                f"{mapping.tp_size}"
            )

    def stack(self) -> DeepseekV41Config:
        """The dimensions of the boundary stack."""
        return DeepseekV41Config(
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_hidden_layers,
            o_groups=self.o_groups,
            o_lora_rank=self.o_lora_rank,
            mlp_size=self.mlp_size,
            hc_mult=self.hc_mult,
            hc_eps=self.hc_eps,
            hc_sinkhorn_iters=self.hc_sinkhorn_iters,
            hc_post_alpha=self.hc_post_alpha,
            rms_norm_eps=self.rms_norm_eps,
            engram_layers=tuple(self.engram_layers),
        )


@fuse_on_build
class DeepseekV41ForCausalLM(PretrainedModel):  # type: ignore[misc]
    """The model class for `trtllm-build`.

    The network has the input ``embeddings`` [num_tokens, H] bf16, TensorRT-LLM's ``all_reduce_workspace`` where there
    is more than one rank, and the output ``hidden_states`` [num_tokens, H] bf16.
    """

    config_class = DeepseekV41PretrainedConfig

    def __init__(self, config: DeepseekV41PretrainedConfig) -> None:
        super().__init__(config)
        self._stack = config.stack()
        specs = checkpoints.tensor_specs(self._stack, config.mapping.tp_size)
        self.layers = ModuleList([Module() for _ in range(self._stack.num_hidden_layers)])
        for name, spec in specs.items():
            *path, last = name.split(".")
            if last == "weight" and path[-1] in ("wo_b", "down"):
                linear = RowLinear(
                    spec.shape[1] * config.mapping.tp_size,
                    spec.shape[0],
                    bias=False,
                    dtype=config.dtype,
                    tp_group=config.mapping.tp_group,
                    tp_size=config.mapping.tp_size,
                )
                setattr(_descend(self, path[:-1]), path[-1], linear)
            else:
                parameter = Parameter(shape=spec.shape, dtype=str(spec.dtype))
                _descend(self, path).register_parameter(last, parameter)

    @classmethod
    def from_checkpoint(
        cls,
        ckpt_dir: str,
        rank: int | None = None,
        config: DeepseekV41PretrainedConfig | None = None,
        *,
        preprocess_weights_hook: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    ) -> DeepseekV41ForCausalLM:
        """The model of one rank with the weights of a checkpoint folder.

        Args:
            ckpt_dir: the folder; see `trtllm_mhc.models.deepseek_v41.checkpoint`.
            rank: None takes the config's.
            config: None reads the folder's.
            preprocess_weights_hook: changes the weights, name to numpy array, before they are used.

        Raises:
            FileNotFoundError: a file of the checkpoint is missing.
            CheckpointError: tensors are missing, not expected, or of another shape or dtype.
        """
        if config is None:
            config = PretrainedConfig.from_json_file(str(Path(ckpt_dir, "config.json")))
        if rank is not None:
            config.set_rank(rank)
        mapping = config.mapping
        tensors = checkpoints.read_tensors(Path(ckpt_dir), config.stack(), mapping.tp_rank, mapping.tp_size)
        if preprocess_weights_hook is not None:
            tensors = preprocess_weights_hook(tensors)
        model = cls(config)
        model._set(tensors)
        return model

    def prepare_inputs(
        self, max_batch_size: int, max_num_tokens: int, opt_num_tokens: int | None = None, **unused: Any
    ) -> dict[str, Any]:
        """The inputs of `forward`, with one optimisation profile of 1 to ``max_num_tokens`` tokens."""
        mapping = self.config.mapping
        optimum = opt_num_tokens or min(max_batch_size, max_num_tokens)
        ranges = OrderedDict(
            [("num_tokens", [[1, optimum, max_num_tokens]]), ("hidden_size", [self.config.hidden_size])]
        )
        shape = [-1, self.config.hidden_size]
        embeddings = Tensor(name="embeddings", dtype=trt.bfloat16, shape=shape, dim_range=ranges)
        if mapping.tp_size > 1:
            # Without it AllReduce would be NCCL's; TensorRT-LLM's runtimes feed it.
            current_all_reduce_helper().set_workspace_tensor(mapping, 1)
        return {"embeddings": embeddings}

    def forward(self, embeddings: Any) -> Any:
        """Makes the network. Weights that no checkpoint set are `ModelWeights` of seed 0, the same on all ranks."""
        mapping = self.config.mapping
        if not all(parameter.is_inited() for parameter in self.parameters()):
            weights = ModelWeights(self._stack)
            self._set(checkpoints.rank_tensors(self._stack, weights, mapping.tp_rank, mapping.tp_size))
        tensors = {name: _to_numpy(parameter.raw_value) for name, parameter in self.named_parameters()}
        shard = checkpoints.RankWeights(self._stack, tensors, mapping.tp_rank, mapping.tp_size)
        network = default_trtnet()
        sublayers = _Sublayers(self, network, shard)
        spec = CommunicatorSpec(mapping.tp_size, mapping.tp_rank, tuple(mapping.tp_group))
        output, _ = layer_loop(
            _BoundariesOfSums(network, spec, coefficients="plugin"),
            self._stack,
            shard,
            embeddings.trt_tensor,
            Step(),
            sublayers.attention,
            sublayers.moe,
        )
        hidden_states = _wrap(output)
        hidden_states.mark_output("hidden_states", "bfloat16")
        return hidden_states

    def _set(self, tensors: Mapping[str, Array]) -> None:
        checkpoints.verify("weights", tensors, checkpoints.tensor_specs(self._stack, self.config.mapping.tp_size))
        for name, parameter in self.named_parameters():
            parameter.value = _from_numpy(tensors[name])


class _Sublayers(SublayerStandIns):
    """The stand-ins, with TensorRT-LLM's linears, whose results are sums over the ranks."""

    def __init__(self, model: DeepseekV41ForCausalLM, network: Any, weights: checkpoints.RankWeights) -> None:
        mapping = model.config.mapping
        super().__init__(network, weights, mapping.tp_rank, mapping.tp_size, "matmul")
        self._model = model

    def row_parallel(self, name: str, x: Any, weight: Array) -> Any:
        """The linear of that name; it has its weight itself."""
        return _descend(self._model, name.split("."))(_wrap(x)).trt_tensor


class _BoundariesOfSums(Boundaries):
    """Boundaries after linears that reduce their results themselves."""

    def _reduce(self, state: BoundaryState, step: Step) -> Any:
        assert state.pending is not None
        return mhc_post(self.network, state.pending, state.residual, state.post, state.comb)


def _descend(module: Any, path: Sequence[str]) -> Any:
    """The submodule at ``path``, made where there is none."""
    for name in path:
        if isinstance(module, ModuleList):
            module = module[int(name)]
            continue
        if not hasattr(module, name):
            setattr(module, name, Module())
        module = getattr(module, name)
    return module


def _wrap(tensor: Any) -> Any:
    """TensorRT's tensor as TensorRT-LLM's."""
    return Tensor(trt_tensor=tensor, network=default_net(), is_network_input=False)


def _from_numpy(array: Array) -> Array:
    """TensorRT-LLM has a bfloat16 of its own for numpy."""
    return array.view(str_dtype_to_np("bfloat16")) if array.dtype == ml_dtypes.bfloat16 else array


def _to_numpy(array: Array) -> Array:
    return array.view(ml_dtypes.bfloat16) if array.dtype == np.dtype(str_dtype_to_np("bfloat16")) else array


# Where TensorRT-LLM looks the class of a config up, even when --model_cls_file names the class of the model.
MODEL_MAP.setdefault(DEEPSEEK_V41, DeepseekV41ForCausalLM)
