# SPDX-License-Identifier: Apache-2.0
"""This project's plugins as network layers, and the attributes of such layers.

TensorRT only says *that* a plugin refused, some of it long after the layer was added. So the inputs are checked here
first, and what a plugin says all the same is raised as :class:`~trtllm_mhc.plugin_control.PluginError`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorrt as trt

from trtllm_mhc import plugin
from trtllm_mhc.network.layers import downcast, tensor_shape
from trtllm_mhc.plugin_control import PluginError, take_error

BOUNDARY = "MhcBoundary"
ALL_REDUCE = "MhcAllReduce"
COEFFICIENTS = "MhcCoefficients"
PUBLISH_LINEAR = "MhcPublishLinear"
PLUGINS = (BOUNDARY, ALL_REDUCE, COEFFICIENTS, PUBLISH_LINEAR)
LOCAL = (COEFFICIENTS, PUBLISH_LINEAR)
"""Those whose outputs depend on no other rank."""

HC_MULT = 4
COEFFICIENT_COUNT = (2 + HC_MULT) * HC_MULT
HIDDEN_SIZES = (4096, 5120, 7168)
TP_SIZES = (1, 2, 4, 8)
STRATEGIES = ("oneshot", "nccl")
FEATURE_STEP = 128
MAXIMUM_FEATURES = 16384
WEIGHT_BLOCK = 32

# Name of an input: the tensor, its dtype, and its shape by symbols (equal symbols have equal sizes) and sizes.
_Inputs = dict[str, tuple[Any, Any, tuple[str | int, ...]]]

# Attributes that a plugin does not write down when they have their default.
_DEFAULTS: dict[str, dict[str, Any]] = {
    BOUNDARY: {"rank": -1, "group": (), "norm_eps": None},
    ALL_REDUCE: {"rank": -1, "group": ()},
    COEFFICIENTS: {},
    PUBLISH_LINEAR: {"rank": -1, "group": ()},
}
_REALS = ("norm_eps", "rms_norm_eps", "hc_eps", "post_alpha")


@dataclass(frozen=True)
class FinalizeInputs:
    """A MoE output before its routed rows are weighted, summed and added to the shared experts'.

    Attributes:
        gemm2_permuted: [P, H] bf16, rows of the second expert GEMM in permuted order.
        expert_weights: [M, K] f32.
        expanded_idx_to_permuted_idx: [M, K] int32, row of ``gemm2_permuted``; -1 where another rank holds the expert.
        shared_output: [M, H] bf16, this rank's partial of the shared experts.
    """

    gemm2_permuted: trt.ITensor
    expert_weights: trt.ITensor
    expanded_idx_to_permuted_idx: trt.ITensor
    shared_output: trt.ITensor


@dataclass(frozen=True)
class BoundaryOutputs:
    """What a boundary produces.

    Attributes:
        residual_out: [M, 4, H] bf16, the streams after this boundary.
        layer_input: [M, H] bf16, the next sublayer's input; None if residual-only.
        mxfp8_data: [M, H] FP8, the layer input quantised in blocks of 32; None unless asked for.
        mxfp8_scales: [128 * ceil(M / 128) * ceil(H / 128)] int32, four E8M0 scales a word, 128x4-swizzled, the padding
            rows zero; None unless asked for.
    """

    residual_out: trt.ITensor
    layer_input: trt.ITensor | None = None
    mxfp8_data: trt.ITensor | None = None
    mxfp8_scales: trt.ITensor | None = None


def add_boundary(
    network: trt.INetworkDefinition,
    contribution: trt.ITensor | FinalizeInputs,
    residual: trt.ITensor,
    post: trt.ITensor,
    comb: trt.ITensor,
    pre: trt.ITensor | None,
    gamma: trt.ITensor | None,
    *,
    tp_size: int,
    norm_eps: float | None,
    rank: int = -1,
    group: Sequence[int] = (),
    published: bool = False,
) -> tuple[trt.ITensor, trt.ITensor | None]:
    """Add a ``MhcBoundary`` to a sublayer's output and return (residual_out, layer_input).

    ``layer_input`` is None if residual-only. Arguments and errors are those of :func:`add_boundary_layer`.
    """
    outputs = add_boundary_layer(
        network,
        contribution,
        residual,
        post,
        comb,
        pre,
        gamma,
        tp_size=tp_size,
        norm_eps=norm_eps,
        rank=rank,
        group=group,
        published=published,
    )
    return outputs.residual_out, outputs.layer_input


def add_boundary_layer(
    network: trt.INetworkDefinition,
    contribution: trt.ITensor | FinalizeInputs,
    residual: trt.ITensor,
    post: trt.ITensor,
    comb: trt.ITensor,
    pre: trt.ITensor | None,
    gamma: trt.ITensor | None,
    *,
    tp_size: int,
    norm_eps: float | None,
    rank: int = -1,
    group: Sequence[int] = (),
    published: bool = False,
    quantize: bool = False,
) -> BoundaryOutputs:
    """Add a ``MhcBoundary``: all-reduce, mHC post, and with ``pre`` and ``gamma`` delayed collapse and RMSNorm.

    Args:
        network: a strongly typed network.
        contribution: this rank's partial sublayer output, [M, H] bf16, or a MoE output to be finalized first. M may be
            dynamic, H is 4096, 5120 or 7168.
        residual: [M, 4, H] bf16, the streams before this boundary.
        post: [M, 4] f32.
        comb: [M, 4, 4] f32, indexed [source, target].
        pre: [M, 4] f32, the carried pre-mix; None, together with ``gamma``, makes the boundary residual-only.
        gamma: [H] bf16, the weight of the norm.
        tp_size: ranks of the group: 1, 2, 4 or 8.
        norm_eps: epsilon of the norm, kept as float32; None only if residual-only.
        rank: index in the group; -1 leaves it to the communicator, so that one plan serves every rank.
        group: world ranks in order; empty means 0 .. tp_size - 1.
        published: the layer that makes ``contribution``, an ``MhcPublishLinear``, also stores it into the mailbox.
        quantize: also return the layer input as MXFP8.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: a shape or an attribute is not as above.
        PluginError: the plugin or TensorRT refused.
    """
    attributes = _group_attributes(BOUNDARY, tp_size, rank, group)
    inputs: _Inputs = {}
    if isinstance(contribution, FinalizeInputs):
        if published:
            raise ValueError(f"{BOUNDARY}: published: expected False with a MoE output to finalize, got True")
        attributes["top_k"] = _top_k(contribution)
        inputs |= {
            "gemm2_permuted": (contribution.gemm2_permuted, trt.bfloat16, ("P", "H")),
            "expert_weights": (contribution.expert_weights, trt.float32, ("M", "K")),
            "expanded_idx_to_permuted_idx": (contribution.expanded_idx_to_permuted_idx, trt.int32, ("M", "K")),
            "shared_output": (contribution.shared_output, trt.bfloat16, ("M", "H")),
        }
    else:
        if published and not _is_published(network, contribution):
            raise ValueError(
                f"{BOUNDARY}: x: expected the output of a {PUBLISH_LINEAR} of the network with published=True, "
                f"got {contribution.name!r}"
            )
        inputs["x"] = (contribution, trt.bfloat16, ("M", "H"))
    inputs |= {
        "residual": (residual, trt.bfloat16, ("M", HC_MULT, "H")),
        "post": (post, trt.float32, ("M", HC_MULT)),
        "comb": (comb, trt.float32, ("M", HC_MULT, HC_MULT)),
    }
    if (pre is None) != (gamma is None):
        raise ValueError(
            f"{BOUNDARY}: expected both pre and gamma, or neither (residual-only), "
            f"got pre={'None' if pre is None else 'a tensor'}, gamma={'None' if gamma is None else 'a tensor'}"
        )
    collapse = pre is not None
    if collapse:
        attributes["norm_eps"] = _epsilon(BOUNDARY, "norm_eps", norm_eps)
        inputs |= {"pre": (pre, trt.float32, ("M", HC_MULT)), "gamma": (gamma, trt.bfloat16, ("H",))}
    elif quantize:
        raise ValueError(f"{BOUNDARY}: quantize: expected False if residual-only (there is no layer input), got True")
    attributes |= {"collapse": int(collapse), "published": int(published), "quantize": int(quantize)}
    _check_inputs(BOUNDARY, inputs)
    outputs = iter(_add(network, BOUNDARY, attributes, [tensor for tensor, _, _ in inputs.values()]))
    return BoundaryOutputs(
        residual_out=next(outputs),
        layer_input=next(outputs) if collapse else None,
        mxfp8_data=next(outputs) if quantize else None,
        mxfp8_scales=next(outputs) if quantize else None,
    )


def add_all_reduce(
    network: trt.INetworkDefinition,
    x: trt.ITensor,
    *,
    tp_size: int,
    rank: int = -1,
    group: Sequence[int] = (),
    strategy: str = "oneshot",
) -> trt.ITensor:
    """Add a ``MhcAllReduce``: the sum of ``x`` [M, H] bf16 in rank order, rounded once to bf16.

    Args:
        network: a strongly typed network.
        x: [M, H] bf16; M may be dynamic, H is 4096, 5120 or 7168.
        tp_size: ranks of the group: 1, 2, 4 or 8.
        rank: index in the group; -1 leaves it to the communicator.
        group: world ranks in order; empty means 0 .. tp_size - 1.
        strategy: ``"oneshot"``, or ``"nccl"`` for NCCL's all-reduce, whose order of summation is its own. The
            communicator must then have been made with NCCL (``nccl_rows`` of ``Communicator``).

    Raises:
        TypeError: ``x`` has another dtype.
        ValueError: a shape or an attribute is not as above.
        PluginError: the plugin or TensorRT refused.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"{ALL_REDUCE}: strategy: expected one of {list(STRATEGIES)}, got {strategy!r}")
    attributes = _group_attributes(ALL_REDUCE, tp_size, rank, group) | {"strategy": strategy}
    _check_inputs(ALL_REDUCE, {"x": (x, trt.bfloat16, ("M", "H"))})
    return _add(network, ALL_REDUCE, attributes, [x])[0]


def add_coefficients(
    network: trt.INetworkDefinition,
    streams: trt.ITensor,
    fn: trt.ITensor,
    scale: trt.ITensor,
    base: trt.ITensor,
    *,
    rms_norm_eps: float,
    hc_eps: float,
    post_alpha: float,
    sinkhorn_iters: int,
) -> tuple[trt.ITensor, trt.ITensor, trt.ITensor]:
    """Add a ``MhcCoefficients``: the mixes that a sublayer computes from its entry streams, in one layer.

    It computes what :func:`trtllm_mhc.network.functional.mhc_coefficients` computes with native layers, in float32 but
    with another order of the sums, and communicates with nobody.

    Args:
        network: a strongly typed network.
        streams: [M, 4, H] bf16; or [M, H] bf16 where all streams are equal, as at the first layer. M may be dynamic, H
            is 4096, 5120 or 7168.
        fn: [24, 4 * H] f32, rows in the order pre, post, comb; [24, H], summed over the streams, with [M, H] streams.
        scale: [3] f32, for pre, post and comb.
        base: [24] f32.
        rms_norm_eps: added to the mean square of the streams; kept as float32, as the next two.
        hc_eps: added to ``pre`` and to every divisor of the Sinkhorn normalisation.
        post_alpha: factor of ``post``.
        sinkhorn_iters: column normalisations of ``comb``, 1 or more; one less of its rows.

    Returns:
        ``(post [M, 4], comb [M, 4, 4], pre [M, 4])``, all f32; ``comb`` indexed [source, target].

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: a shape or an attribute is not as above.
        PluginError: the plugin or TensorRT refused.
    """
    if not 1 <= sinkhorn_iters < 2**31:
        raise ValueError(f"{COEFFICIENTS}: sinkhorn_iters: expected 1 or more, got {sinkhorn_iters}")
    shape = tensor_shape(streams)
    broadcast = shape is not None and len(shape) == 2
    features = -1 if not shape else shape[-1] if broadcast else HC_MULT * shape[-1]
    attributes = {
        "rms_norm_eps": _epsilon(COEFFICIENTS, "rms_norm_eps", rms_norm_eps),
        "hc_eps": _epsilon(COEFFICIENTS, "hc_eps", hc_eps),
        "post_alpha": _real(COEFFICIENTS, "post_alpha", post_alpha),
        "sinkhorn_iters": int(sinkhorn_iters),
        "broadcast": int(broadcast),
    }
    inputs: _Inputs = {
        "streams": (streams, trt.bfloat16, ("M", "H") if broadcast else ("M", HC_MULT, "H")),
        "fn": (fn, trt.float32, (COEFFICIENT_COUNT, features)),
        "scale": (scale, trt.float32, (3,)),
        "base": (base, trt.float32, (COEFFICIENT_COUNT,)),
    }
    _check_inputs(COEFFICIENTS, inputs)
    post, comb, pre = _add(network, COEFFICIENTS, attributes, [streams, fn, scale, base])
    return post, comb, pre


def add_publish_linear(
    network: trt.INetworkDefinition,
    activation: trt.ITensor,
    weight: trt.ITensor,
    scales: trt.ITensor | None = None,
    *,
    tp_size: int,
    rank: int = -1,
    group: Sequence[int] = (),
) -> trt.ITensor:
    """Add a ``MhcPublishLinear``: ``activation @ weight.T``, this rank's partial, stored into the mailbox as well.

    The output is what a ``MhcBoundary`` with ``published=True`` takes, which must be the next user of the mailbox lane
    and the output's only reader that communicates. Weights are constants: they may be read before earlier layers have
    ended. So do not compute them in the network.

    Args:
        network: a strongly typed network.
        activation: [M, K] bf16, this rank's share of the input features. M may be dynamic; K is a multiple of 128 up to
            16384.
        weight: [H, K] bf16, or FP8 with ``scales``; H is 4096, 5120 or 7168.
        scales: [H / 32, K / 128] int32, four UE8M0 bytes a word, one byte for each block of 32 x 32 weights
            (:func:`trtllm_mhc.reference.pack_weight_scales`).
        tp_size: ranks of the group: 1, 2, 4 or 8.
        rank: index in the group; -1 leaves it to the communicator.
        group: world ranks in order; empty means 0 .. tp_size - 1.

    Returns:
        [M, H] bf16, fp32 sums rounded once, -0 as +0.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: a shape or an attribute is not as above.
        PluginError: the plugin or TensorRT refused.
    """
    attributes = _group_attributes(PUBLISH_LINEAR, tp_size, rank, group) | {"weight_type": int(scales is not None)}
    inputs: _Inputs = {
        "activation": (activation, trt.bfloat16, ("M", "K")),
        "weight": (weight, trt.bfloat16 if scales is None else trt.fp8, ("H", "K")),
    }
    if scales is not None:
        hidden, features = tensor_shape(weight) or (-1, -1)
        inputs["scales"] = (scales, trt.int32, (hidden // WEIGHT_BLOCK, features // FEATURE_STEP))
    sizes = _check_inputs(PUBLISH_LINEAR, inputs)
    if not 0 < sizes["K"] <= MAXIMUM_FEATURES or sizes["K"] % FEATURE_STEP:
        raise ValueError(
            f"{PUBLISH_LINEAR}: input features K: expected a multiple of {FEATURE_STEP} up to {MAXIMUM_FEATURES}, "
            f"got {sizes['K']}"
        )
    return _add(network, PUBLISH_LINEAR, attributes, [tensor for tensor, _, _ in inputs.values()])[0]


def create_plugin(name: str, attributes: Mapping[str, Any], *, phase: Any = None) -> Any:
    """A plugin object (``IPluginV3``) of this project, for ``network.add_plugin_v3``.

    Args:
        name: one of :data:`PLUGINS`.
        attributes: the plugin's attributes: integers, sequences of integers, floats (kept as float32) or strings.
        phase: ``trt.TensorRTPhase``; build if None.

    Raises:
        PluginError: the creator refused; the text says which attribute, what was expected and what came.
    """
    creator = plugin.creator(name)
    # The arrays must outlive the call: a PluginField only points to them.
    arrays = {key: _field_array(value) for key, value in attributes.items()}
    fields = trt.PluginFieldCollection([trt.PluginField(key, *array) for key, array in arrays.items()])
    take_error()  # an older one that nobody asked for
    made = creator.create_plugin(name, fields, trt.TensorRTPhase.BUILD if phase is None else phase)
    if made is None:
        raise PluginError(take_error(any_thread=True) or f"{name}: TensorRT made no plugin; its log says why")
    return made


def is_plugin_layer(layer: trt.ILayer, name: str) -> bool:
    """Whether ``layer`` is this project's plugin ``name``."""
    if layer.type != trt.LayerType.PLUGIN_V3:
        return False
    core = downcast(layer).plugin.get_capability_interface(trt.PluginCapabilityType.CORE)
    return (core.plugin_namespace, core.plugin_name, core.plugin_version) == (plugin.NAMESPACE, name, plugin.VERSION)


def read_fields(layer: trt.ILayer) -> dict[str, Any]:
    """The attributes of one of this project's plugin layers, from this API, ONNX or anywhere else.

    They come from the plugin's metadata string, which holds all of them; the bindings cannot hand out the fields of a
    plugin that is written in C++.

    Returns:
        Attribute name to value: integers, reals as a float (the float32 that the plugin holds; ``norm_eps`` is None if
        residual-only), ``group`` as a tuple (empty: 0 .. tp_size - 1), ``strategy`` as a string.

    Raises:
        ValueError: the layer is none of this project's plugins.
    """
    name = next((name for name in PLUGINS if is_plugin_layer(layer, name)), None)
    if name is None:
        raise ValueError(f"{layer.name}: expected a layer of one of {list(PLUGINS)}, got {layer.type}")
    build = downcast(layer).plugin.get_capability_interface(trt.PluginCapabilityType.BUILD)
    written = (field.partition("=") for field in build.metadata_string.split(" "))
    return _DEFAULTS[name] | {key: _field_value(key, text) for key, _, text in written}


def _field_value(key: str, text: str) -> Any:
    if key in _REALS:
        return float(np.float32(text))
    if key == "strategy":
        return text
    if text.startswith("["):
        return tuple(int(each) for each in text.strip("[]").split(","))
    return int(text)


def _group_attributes(what: str, tp_size: int, rank: int, group: Sequence[int]) -> dict[str, Any]:
    if tp_size not in TP_SIZES:
        raise ValueError(f"{what}: tp_size: expected one of {list(TP_SIZES)}, got {tp_size}")
    if not -1 <= rank < tp_size:
        raise ValueError(f"{what}: rank: expected -1 (the communicator's) to {tp_size - 1}, got {rank}")
    ranks = tuple(int(each) for each in group)
    if ranks and (len(set(ranks)) != tp_size or len(ranks) != tp_size or min(ranks) < 0):
        raise ValueError(f"{what}: group: expected {tp_size} distinct world ranks of 0 or more, got {list(ranks)}")
    attributes: dict[str, Any] = {"tp_size": tp_size, "rank": rank}
    return attributes | ({"group": ranks} if ranks else {})


def _epsilon(what: str, name: str, value: float | None) -> float:
    representable = value is not None and 0 <= value <= float(np.finfo(np.float32).max)
    # An epsilon that vanishes in float32 turns a row of zeros into NaN.
    if value is None or not representable or (value > 0 and np.float32(value) == 0):
        raise ValueError(f"{what}: {name}: expected a finite number of 0 or more that float32 can hold, got {value}")
    return float(value)


def _real(what: str, name: str, value: float) -> float:
    if not abs(value) <= float(np.finfo(np.float32).max):
        raise ValueError(f"{what}: {name}: expected a finite number that float32 can hold, got {value}")
    return float(value)


def _is_published(network: trt.INetworkDefinition, tensor: trt.ITensor) -> bool:
    """Whether a tensor is the output of a publishing layer, which is looked for among the newest layers first."""
    for index in reversed(range(network.num_layers)):
        layer = network.get_layer(index)
        if any(layer.get_output(slot) is tensor for slot in range(layer.num_outputs)):
            return is_plugin_layer(layer, PUBLISH_LINEAR)
    return False


def _top_k(moe: FinalizeInputs) -> int:
    shape = tensor_shape(moe.expert_weights)
    if shape is None or len(shape) != 2 or shape[1] < 1:
        raise ValueError(f"{BOUNDARY}: expert_weights: expected shape [M, K] with static K of 1 or more, got {shape}")
    return shape[1]


def _check_inputs(what: str, inputs: _Inputs) -> dict[str, int]:
    """Compare dtypes and shapes; only M and P may be dynamic (-1). Returns the sizes by symbol."""
    sizes: dict[str, int] = {}
    for name, (tensor, dtype, expected) in inputs.items():
        if tensor.dtype != dtype:
            raise TypeError(f"{what}: {name}: expected {dtype}, got {tensor.dtype}")
        got = tensor_shape(tensor)
        known = [f"{axis}={sizes[axis]}" if axis in sizes else str(axis) for axis in map(str, expected)]
        if got is None or len(got) != len(expected):
            raise ValueError(f"{what}: {name}: expected shape [{', '.join(known)}], got {got}")
        for axis, size in zip(expected, got, strict=True):
            dynamic = size == -1 and axis in ("M", "P")
            wanted = axis if isinstance(axis, int) else sizes.setdefault(axis, size) if not dynamic else size
            if size != wanted or (size < 0 and not dynamic):
                raise ValueError(f"{what}: {name}: expected shape [{', '.join(known)}], got {list(got)}")
    if sizes["H"] not in HIDDEN_SIZES:
        raise ValueError(f"{what}: hidden size H: expected one of {list(HIDDEN_SIZES)}, got {sizes['H']}")
    return sizes


def _field_array(value: Any) -> tuple[np.ndarray[Any, Any], Any]:
    if isinstance(value, str):
        return np.frombuffer(value.encode(), np.int8), trt.PluginFieldType.CHAR
    if isinstance(value, float):
        return np.array([value], np.float32), trt.PluginFieldType.FLOAT32
    return np.atleast_1d(np.asarray(value, np.int32)), trt.PluginFieldType.INT32


def _add(network: Any, name: str, attributes: Mapping[str, Any], inputs: list[Any]) -> list[Any]:
    """Add the layer and return its outputs, whose shapes TensorRT could infer."""
    made = create_plugin(name, attributes)
    layer = network.add_plugin_v3(inputs, [], made)
    outputs = [] if layer is None else [layer.get_output(i) for i in range(layer.num_outputs)]
    if not outputs or any(tensor_shape(output) is None for output in outputs):
        raise PluginError(take_error(any_thread=True) or f"{name}: TensorRT refused the layer; its log says why")
    return outputs
