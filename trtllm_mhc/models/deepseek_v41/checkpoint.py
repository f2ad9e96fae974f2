# SPDX-License-Identifier: Apache-2.0
"""The boundary stack as a checkpoint folder in TensorRT-LLM's form: ``config.json`` and ``rank{r}.safetensors``.

``config.json`` is what TensorRT-LLM calls a pretrained config, with V4.1's dimensions beside the usual ones. Each
rank's file has that rank's shards, under the names that the model class of `trtllm_mhc.integrations.tensorrt_llm` gives
them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from trtllm_mhc.models import safetensors
from trtllm_mhc.models.architectures import DEEPSEEK_V41
from trtllm_mhc.models.deepseek_v41.config import DeepseekV41Config
from trtllm_mhc.models.deepseek_v41.stack import StackWeights
from trtllm_mhc.models.deepseek_v41.weights import AttentionWeights, ElementwiseWeights, EngramWeights, MlpWeights
from trtllm_mhc.network.boundaries import LayerWeights
from trtllm_mhc.network.ops import Array

_BF16 = np.dtype(ml_dtypes.bfloat16)
_F32 = np.dtype(np.float32)
_I32 = np.dtype(np.int32)
_MOST_PROBLEMS = 8


class CheckpointError(ValueError):
    """A checkpoint is not what it should be. The message lists what is wrong, with what was expected and what came."""


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of one tensor on one rank."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


def tensor_specs(config: DeepseekV41Config, tp_size: int) -> dict[str, TensorSpec]:
    """Every tensor of one rank's shard by name. All ranks have the same.

    Raises:
        CheckpointError: the sharded sizes are no multiples of ``tp_size``.
    """
    for name in ("attention_size", "mlp_size"):
        if tp_size < 1 or getattr(config, name) % tp_size:
            raise CheckpointError(f"{name}: expected a multiple of tp_size {tp_size}, got {getattr(config, name)}")
    hidden, hc = config.hidden_size, config.hc_mult
    columns, intermediate = config.attention_size // tp_size, config.mlp_size // tp_size
    coefficients = (2 + hc) * hc
    specs: dict[str, TensorSpec] = {}
    for index in range(config.num_hidden_layers):
        layer = f"layers.{index}"
        for name in ("attn", "ffn"):
            specs[f"{layer}.hc_{name}.fn"] = TensorSpec((coefficients, hc * hidden), _F32)
            specs[f"{layer}.hc_{name}.scale"] = TensorSpec((3,), _F32)
            specs[f"{layer}.hc_{name}.base"] = TensorSpec((coefficients,), _F32)
            specs[f"{layer}.{name}_norm.weight"] = TensorSpec((hidden,), _BF16)
        specs[f"{layer}.attention.columns"] = TensorSpec((columns,), _I32)
        specs[f"{layer}.attention.gain"] = TensorSpec((1, columns), _BF16)
        specs[f"{layer}.attention.wo_b.weight"] = TensorSpec((hidden, columns), _BF16)
        specs[f"{layer}.mlp.gate"] = TensorSpec((intermediate, hidden), _BF16)
        specs[f"{layer}.mlp.up"] = TensorSpec((intermediate, hidden), _BF16)
        specs[f"{layer}.mlp.down.weight"] = TensorSpec((hidden, intermediate), _BF16)
        if index in config.engram_layers:
            for name in ("norm", "key", "value"):
                specs[f"{layer}.engram.{name}"] = TensorSpec((1, 1, hidden), _BF16)
    specs["final_norm.weight"] = TensorSpec((hidden,), _BF16)
    return specs


def rank_tensors(config: DeepseekV41Config, weights: StackWeights, rank: int, tp_size: int) -> dict[str, Array]:
    """The tensors of one rank's shard, under the names of `tensor_specs`."""
    tensors: dict[str, Array] = {}
    for index in range(config.num_hidden_layers):
        name = f"layers.{index}"
        layer = weights.layer(index)
        attention, mlp = weights.attention(index, rank, tp_size), weights.mlp(index, rank, tp_size)
        tensors |= {
            f"{name}.hc_attn.fn": layer.hc_attn_fn,
            f"{name}.hc_attn.scale": layer.hc_attn_scale,
            f"{name}.hc_attn.base": layer.hc_attn_base,
            f"{name}.attn_norm.weight": layer.attn_norm,
            f"{name}.hc_ffn.fn": layer.hc_ffn_fn,
            f"{name}.hc_ffn.scale": layer.hc_ffn_scale,
            f"{name}.hc_ffn.base": layer.hc_ffn_base,
            f"{name}.ffn_norm.weight": layer.ffn_norm,
            f"{name}.attention.columns": attention.columns,
            f"{name}.attention.gain": attention.gain,
            f"{name}.attention.wo_b.weight": attention.wo_b,
            f"{name}.mlp.gate": mlp.gate,
            f"{name}.mlp.up": mlp.up,
            f"{name}.mlp.down.weight": mlp.down,
        }
        if index in config.engram_layers:
            engram = weights.engram(index)
            tensors |= {
                f"{name}.engram.norm": engram.norm,
                f"{name}.engram.key": engram.key,
                f"{name}.engram.value": engram.value,
            }
    tensors["final_norm.weight"] = weights.final_norm()
    return tensors


def verify(what: str, tensors: Mapping[str, Array], specs: Mapping[str, TensorSpec]) -> None:
    """Raise unless ``tensors`` are exactly those of ``specs``.

    Raises:
        CheckpointError: names the tensors that are missing, not expected, or of another shape or dtype.
    """
    problems = [f"{name}: expected {specs[name]}, is missing" for name in specs if name not in tensors]
    problems += [f"{name}: not expected" for name in tensors if name not in specs]
    for name, spec in specs.items():
        if name in tensors and (tensors[name].shape, tensors[name].dtype) != (spec.shape, spec.dtype):
            got = TensorSpec(tensors[name].shape, tensors[name].dtype)
            problems.append(f"{name}: expected {spec}, got {got}")
    if problems:
        shown = problems[:_MOST_PROBLEMS]
        more = [f"and {len(problems) - len(shown)} more"] if len(problems) > len(shown) else []
        raise CheckpointError(f"{what}: " + "; ".join([*shown, *more]))


def pretrained_config(config: DeepseekV41Config, tp_size: int) -> dict[str, Any]:
    """The content of ``config.json``."""
    return {
        "architecture": DEEPSEEK_V41,
        "dtype": "bfloat16",
        "num_attention_heads": config.o_groups,
        "vocab_size": None,
        "norm_epsilon": config.rms_norm_eps,
        "hidden_act": "silu",
        "intermediate_size": config.mlp_size,
        "mapping": {"world_size": tp_size, "tp_size": tp_size, "pp_size": 1},
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": None},
        **asdict(config),
        "engram_layers": list(config.engram_layers),
    }


def parse_config(what: str, content: Any) -> tuple[DeepseekV41Config, int]:
    """The dimensions and the ranks that ``config.json`` says.

    Raises:
        CheckpointError: something is missing or of another type, or the model is another or distributed otherwise.
    """
    if not isinstance(content, dict):
        raise CheckpointError(f"{what}: expected an object, got {type(content).__name__}")
    if content.get("architecture") != DEEPSEEK_V41:
        raise CheckpointError(f"{what}: architecture: expected {DEEPSEEK_V41!r}, got {content.get('architecture')!r}")
    if content.get("dtype") != "bfloat16":
        raise CheckpointError(f"{what}: dtype: expected 'bfloat16', got {content.get('dtype')!r}")
    mapping = content.get("mapping") or {}
    tp_size = mapping.get("tp_size", 1)
    world_size = mapping.get("world_size", tp_size)
    if not isinstance(tp_size, int) or tp_size < 1 or world_size != tp_size:
        raise CheckpointError(f"{what}: mapping: expected tp_size ranks and no other parallelism, got {mapping}")
    values: dict[str, Any] = {}
    for field in fields(DeepseekV41Config):
        if field.name not in content:
            raise CheckpointError(f"{what}: {field.name}: is missing")
        value, default = content[field.name], field.default
        if isinstance(default, tuple):
            if not isinstance(value, list) or not all(isinstance(each, int) for each in value):
                raise CheckpointError(f"{what}: {field.name}: expected a list of integers, got {value!r}")
            value = tuple(value)
        elif isinstance(value, bool) or not isinstance(value, (int, float) if isinstance(default, float) else int):
            raise CheckpointError(f"{what}: {field.name}: expected {type(default).__name__}, got {value!r}")
        values[field.name] = value
    try:
        return DeepseekV41Config(**values), tp_size
    except ValueError as error:
        raise CheckpointError(f"{what}: {error}") from None


def write_checkpoint(folder: Path, config: DeepseekV41Config, weights: StackWeights, tp_size: int) -> None:
    """Write the checkpoint of ``tp_size`` ranks into ``folder``, which is made, or nothing if anything is wrong.

    Raises:
        CheckpointError: the weights do not fit ``config``.
    """
    specs = tensor_specs(config, tp_size)
    for rank in range(tp_size):
        verify(f"weights of rank {rank}", rank_tensors(config, weights, rank, tp_size), specs)
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(tp_size):
        safetensors.save(rank_file(folder, rank), rank_tensors(config, weights, rank, tp_size))
    (folder / "config.json").write_text(json.dumps(pretrained_config(config, tp_size), indent=2) + "\n")


def read_config(folder: Path) -> tuple[DeepseekV41Config, int]:
    """The dimensions of the checkpoint in ``folder`` and its number of ranks.

    Raises:
        FileNotFoundError: there is no ``config.json``.
        CheckpointError: it is not this model's.
    """
    path = folder / "config.json"
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from None
    return parse_config(str(path), content)


def read_tensors(folder: Path, config: DeepseekV41Config, rank: int, tp_size: int) -> dict[str, Array]:
    """One rank's tensors, read-only views of the mapped file, verified against ``config``.

    Raises:
        FileNotFoundError: there is no file for that rank.
        CheckpointError: tensors are missing, not expected, or of another shape or dtype.
    """
    path = rank_file(folder, rank)
    try:
        tensors = safetensors.load(path)
    except safetensors.FormatError as error:
        raise CheckpointError(str(error)) from None
    verify(str(path), tensors, tensor_specs(config, tp_size))
    return tensors


def rank_file(folder: Path, rank: int) -> Path:
    """Where one rank's tensors are."""
    return folder / f"rank{rank}.safetensors"


class RankWeights:
    """One rank's weights from the tensors of its shard: `StackWeights`, as far as matrices go.

    Args:
        config: the dimensions.
        tensors: under the names of `tensor_specs`.
        rank: the rank that they are of.
        tp_size: number of ranks.
    """

    def __init__(self, config: DeepseekV41Config, tensors: Mapping[str, Array], rank: int, tp_size: int) -> None:
        self._config = config
        self._tensors = tensors
        self._ranks = (rank, tp_size)

    @property
    def config(self) -> DeepseekV41Config:
        """The dimensions that they were made for."""
        return self._config

    def layer(self, index: int) -> LayerWeights:
        """The boundaries of layer ``index``."""
        config = self.config
        attention = self._all(f"layers.{index}.hc_attn", "fn", "scale", "base")
        ffn = self._all(f"layers.{index}.hc_ffn", "fn", "scale", "base")
        broadcast = None
        if index == 0:
            broadcast = attention["fn"].reshape(-1, config.hc_mult, config.hidden_size).sum(axis=1)
        return LayerWeights(
            hc_attn_fn=attention["fn"],
            hc_attn_scale=attention["scale"],
            hc_attn_base=attention["base"],
            hc_ffn_fn=ffn["fn"],
            hc_ffn_scale=ffn["scale"],
            hc_ffn_base=ffn["base"],
            attn_norm=self._tensors[f"layers.{index}.attn_norm.weight"],
            ffn_norm=self._tensors[f"layers.{index}.ffn_norm.weight"],
            norm_eps=config.rms_norm_eps,
            rms_norm_eps=config.rms_norm_eps,
            hc_eps=config.hc_eps,
            hc_post_alpha=config.hc_post_alpha,
            hc_sinkhorn_iters=config.hc_sinkhorn_iters,
            hc_mult=config.hc_mult,
            hc_attn_fn_broadcast=broadcast,
        )

    def attention(self, index: int, rank: int, tp_size: int) -> AttentionWeights:
        """The attention of layer ``index``; ``rank`` and ``tp_size`` must be the shard's."""
        self._check(rank, tp_size)
        attention = self._all(f"layers.{index}.attention", "columns", "gain", "wo_b.weight")
        return AttentionWeights(attention["columns"], attention["gain"], attention["wo_b.weight"])

    def mlp(self, index: int, rank: int, tp_size: int) -> MlpWeights:
        """The gated MLP of layer ``index``; ``rank`` and ``tp_size`` must be the shard's."""
        self._check(rank, tp_size)
        mlp = self._all(f"layers.{index}.mlp", "gate", "up", "down.weight")
        return MlpWeights(mlp["gate"], mlp["up"], mlp["down.weight"])

    def elementwise(self, sublayer: int, rank: int, tp_size: int) -> ElementwiseWeights:
        """Not in a checkpoint.

        Raises:
            CheckpointError: always.
        """
        raise CheckpointError("a checkpoint has matrices: expected sublayers 'matmul', got 'none'")

    def engram(self, index: int) -> EngramWeights:
        """The injection before the attention of layer ``index``."""
        return EngramWeights(**self._all(f"layers.{index}.engram", "norm", "key", "value"))

    def final_norm(self) -> Array:
        """[H] bf16, the weight of the norm after the final collapse."""
        return self._tensors["final_norm.weight"]

    def _all(self, prefix: str, *names: str) -> dict[str, Array]:
        return {name: self._tensors[f"{prefix}.{name}"] for name in names}

    def _check(self, rank: int, tp_size: int) -> None:
        if (rank, tp_size) != self._ranks:
            raise CheckpointError(
                f"expected the shard of rank {rank} of {tp_size}, got that of rank {self._ranks[0]} of {self._ranks[1]}"
            )
