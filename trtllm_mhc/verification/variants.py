# SPDX-License-Identifier: Apache-2.0
"""Every variant of the boundary as two small networks, unfused and fused, and what is to be equal about them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import numpy.typing as npt
import tensorrt as trt

from trtllm_mhc import reference
from trtllm_mhc.network import CommunicatorSpec, functional, plugins
from trtllm_mhc.reference import compare
from trtllm_mhc.rewrite import FuseOptions, Report, fuse_boundaries
from trtllm_mhc.verification import checks
from trtllm_mhc.verification.backends import Job

Array = npt.NDArray[Any]
Tensors = Mapping[str, Array]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
HC = 4
_DTYPES = {BFLOAT16: trt.bfloat16, np.dtype(np.float32): trt.float32, np.dtype(np.int32): trt.int32}


@dataclass(frozen=True)
class Size:
    """The dimensions of a variant's networks; by default DeepSeek V4.1-Flash's.

    Attributes:
        tp_size: ranks.
        rows: tokens (M) that inputs are made for.
        hidden: H.
        top_k: routes of a token.
        permuted_rows: rows of the experts' outputs.
        norm_eps: epsilon of the norm.
    """

    tp_size: int
    rows: int = 8
    hidden: int = 5120
    top_k: int = 6
    permuted_rows: int = 64
    norm_eps: float = 1e-20


@dataclass
class Outcome:
    """What the comparison of a variant's two forms found.

    Attributes:
        equal: whether the fused form has the reference's bits on every rank.
        agrees: whether the unfused form is as near as the order of its sums allows.
        max_ulp: largest distance of a bfloat16 element of the unfused form from the reference on the same
            contributions.
        details: what differs.
    """

    equal: bool = True
    agrees: bool = True
    max_ulp: int = 0
    details: list[str] = field(default_factory=list)

    def same(self, actual: Array, expected: Array, what: str) -> None:
        """The fused form must have these bits."""
        try:
            compare.assert_bits_equal(actual, expected, what)
        except (AssertionError, TypeError, ValueError) as error:
            self.equal = False
            self.details.append(f"fused: {error}")

    def near(self, holds: npt.NDArray[np.bool_] | bool, what: str) -> None:
        """TensorRT's own layers must be near here."""
        if not np.all(holds):
            self.agrees = False
            self.details.append(f"{what}: farther off than the order of the sums explains")

    def join(self, other: Outcome) -> None:
        """Take another comparison of the same variant into account."""
        self.equal &= other.equal
        self.agrees &= other.agrees
        self.max_ulp = max(self.max_ulp, other.max_ulp)
        self.details += other.details

    def measure(self, actual: Array, expected: Array) -> None:
        """Take a distance into account."""
        self.max_ulp = max(self.max_ulp, int(np.max(compare.ulp_distance(actual, expected), initial=0)))


class Variant:
    """A boundary of one kind: by itself the plain one.

    Inputs are a dict for each rank; residual, mixes and weights are the same on all of them.
    """

    name = "plain"
    #: What is not the same about the two forms; empty if nothing.
    note = ""
    #: Whether TensorRT gets through building the unfused form.
    unfused_builds = True
    collapse = True
    options = FuseOptions()

    def __init__(self, size: Size) -> None:
        self.size = size

    # ---- networks ----------------------------------------------------------------------------------------------------

    def unfused(self) -> Job:
        """TensorRT's own layers and an all-reduce."""
        return Job(
            f"{self.name}, unfused", lambda network, rank: self.define(network, True), per_rank=False, timed=True
        )

    def fused(self) -> Job:
        """The same after the pass, or with the plugin where the pass does not use it.

        Raises (when populated):
            RuntimeError: the pass did not do what the variant is about.
        """
        return Job(f"{self.name}, fused", lambda network, rank: self.define_fused(network), per_rank=False, timed=True)

    def define(self, network: trt.INetworkDefinition, shows_contribution: bool) -> None:
        """The unfused form; ``contribution`` is an output too where it is computed and asked for."""
        inputs = self.add_inputs(network)
        x = self.add_contribution(network, inputs)
        if shows_contribution and "x" not in inputs:
            self.mark(network, {"contribution": x})
        self.finish(network, inputs, x)

    def define_fused(self, network: trt.INetworkDefinition) -> None:
        """The fused form."""
        self.define(network, False)
        report = fuse_boundaries(network, self.options)
        if not self.is_fused(report):
            raise RuntimeError(f"the boundary of the variant {self.name!r} was not fused as such:\n{report.to_text()}")

    def is_fused(self, report: Report) -> bool:
        """Whether the pass did what the variant is about."""
        status = "full" if self.collapse else "residual_only"
        return [(entry.status, entry.contribution) for entry in report.found] == [(status, "plain")]

    def add_inputs(self, network: trt.INetworkDefinition) -> dict[str, Any]:
        """Network inputs like the arrays of `feeds`, the number of rows dynamic."""
        inputs = {}
        for name, array in self.feeds(0)[0].items():
            lead = array.shape[:1] if name in ("gamma", "gemm2_permuted") else (-1,)
            inputs[name] = network.add_input(name, _DTYPES[array.dtype], (*lead, *array.shape[1:]))
        return inputs

    def add_contribution(self, network: trt.INetworkDefinition, inputs: Mapping[str, Any]) -> Any:
        """What goes into the all-reduce."""
        return inputs["x"]

    def finish(self, network: trt.INetworkDefinition, inputs: Mapping[str, Any], x: Any) -> None:
        """All-reduce, post and entry of the unfused form, and its outputs."""
        size = self.size
        reduced = functional.all_reduce(network, x, CommunicatorSpec(size.tp_size))
        streams = functional.mhc_post(network, reduced, inputs["residual"], inputs["post"], inputs["comb"])
        outputs = {"residual_out": streams}
        if self.collapse:
            outputs["layer_input"] = functional.mhc_pre_delayed(
                network, streams, inputs["pre"], inputs["gamma"], size.norm_eps
            )
        self.mark(network, outputs | self.add_behind(network, streams))

    def add_behind(self, network: trt.INetworkDefinition, streams: Any) -> dict[str, Any]:
        """Further outputs, computed from the streams."""
        return {}

    @staticmethod
    def mark(network: trt.INetworkDefinition, outputs: Mapping[str, Any]) -> None:
        """Make tensors outputs of these names."""
        for name, tensor in outputs.items():
            tensor.name = name
            network.mark_output(tensor)

    # ---- numbers -----------------------------------------------------------------------------------------------------

    def feeds(self, seed: int) -> list[dict[str, Array]]:
        """Inputs of the size that V4.1 has, for each rank."""
        size, rng = self.size, np.random.default_rng(seed)
        comb = rng.random((size.rows, HC, HC), np.float32)
        shared = {
            "residual": _normal(rng, size.rows, HC, size.hidden),
            "post": 2 * rng.random((size.rows, HC), np.float32),
            "comb": comb / comb.sum(axis=1, keepdims=True),
        }
        if self.collapse:
            shared["pre"] = rng.random((size.rows, HC), np.float32) + np.float32(1e-6)
            shared["gamma"] = (1 + 0.1 * rng.standard_normal(size.hidden, np.float32)).astype(BFLOAT16)
        return [self.own(rng, rank) | shared for rank in range(size.tp_size)]

    def own(self, rng: np.random.Generator, rank: int) -> dict[str, Array]:
        """One rank's own inputs, with zeros of both signs among the contributions."""
        x = _normal(rng, self.size.rows, self.size.hidden)
        x[:, 16 * rank : 16 * rank + 8] = 0.0
        x[:, 8 * rank :: 97] = -0.0
        return {"x": x}

    # ---- comparison --------------------------------------------------------------------------------------------------

    def compare(self, feeds: Sequence[Tensors], fused: Sequence[Tensors], unfused: Sequence[Tensors]) -> Outcome:
        """Both forms' outputs for the same inputs, the fused ones with the reference, the unfused ones by the rule."""
        outcome, eps = Outcome(), self.size.norm_eps if self.collapse else None
        ours = self.contributions(feeds, fused, outcome)
        expected = self.expected(feeds[0], ours)
        for rank, out in enumerate(fused):
            for name, array in expected.items():
                outcome.same(out[name], array, f"rank {rank}, {name}")
        theirs = self.contributions(feeds, unfused, outcome)
        inputs = [{**feed, "x": x} for feed, x in zip(feeds, theirs, strict=True)]
        near = [self.expected(feeds[0], theirs)] * len(feeds)
        agreement = checks.check_agreement(inputs, near, unfused, eps)
        outcome.near(agreement.agrees, "unfused, streams and layer input")
        outcome.max_ulp = max(outcome.max_ulp, agreement.max_ulp)
        for form, outputs in (("fused", fused), ("unfused", unfused)):
            if not checks.ranks_equal([_without_contribution(out) for out in outputs]):
                outcome.equal = False
                outcome.details.append(f"{form}: the ranks differ")
        self.compare_behind(feeds, fused, unfused, outcome)
        return outcome

    def contributions(self, feeds: Sequence[Tensors], outputs: Sequence[Tensors], outcome: Outcome) -> list[Array]:
        """What each rank added to the sum: as the form shows it, judged by the rule for sums, or the reference's."""
        result = []
        for rank, (feed, out) in enumerate(zip(feeds, outputs, strict=True)):
            expected, magnitude, terms = self.contribution(feed)
            actual = out.get("contribution")
            if actual is not None:
                actual = reference.clear_negative_zero(actual)
                outcome.near(
                    compare.sums_agree(actual, expected, magnitude, terms), f"unfused, rank {rank}, contribution"
                )
                outcome.measure(actual, expected)
            result.append(expected if actual is None else actual)
        return result

    def contribution(self, feed: Tensors) -> tuple[Array, Array, int]:
        """A rank's summand by the reference, the sum of the magnitudes of its terms, and their number."""
        return feed["x"], np.abs(feed["x"].astype(np.float64)), 1

    def expected(self, feed: Tensors, xs: Sequence[Array]) -> dict[str, Array]:
        """The boundary's outputs by the reference."""
        collapse = (feed["pre"], feed["gamma"], self.size.norm_eps) if self.collapse else ()
        streams, layer_input = reference.boundary(xs, feed["residual"], feed["post"], feed["comb"], *collapse)
        return {"residual_out": streams} | ({} if layer_input is None else {"layer_input": layer_input})

    def compare_behind(
        self, feeds: Sequence[Tensors], fused: Sequence[Tensors], unfused: Sequence[Tensors], outcome: Outcome
    ) -> None:
        """Judge what `add_behind` added."""


class ResidualOnly(Variant):
    """All-reduce and post, without an entry."""

    name = "residual_only"
    collapse = False


class Finalize(Variant):
    """The contribution is a MoE's output, finalized by the boundary."""

    name = "finalize"

    def is_fused(self, report: Report) -> bool:
        return [(entry.status, entry.contribution) for entry in report.found] == [("full", "finalize")]

    def add_contribution(self, network: trt.INetworkDefinition, inputs: Mapping[str, Any]) -> Any:
        return functional.moe_finalize(network, *(inputs[name] for name in _MOE))

    def own(self, rng: np.random.Generator, rank: int) -> dict[str, Array]:
        size = self.size
        index = rng.integers(0, size.permuted_rows, (size.rows, size.top_k)).astype(np.int32)
        # Each expert is on one rank; on the others its routes are -1.
        index[rng.integers(0, size.tp_size, index.shape) != rank] = -1
        return {
            "gemm2_permuted": _normal(rng, size.permuted_rows, size.hidden),
            "expert_weights": rng.random((size.rows, size.top_k), np.float32) / np.float32(2),
            "expanded_idx_to_permuted_idx": index,
            "shared_output": _normal(rng, size.rows, size.hidden),
        }

    def contribution(self, feed: Tensors) -> tuple[Array, Array, int]:
        rows, weights, index, shared = (feed[name] for name in _MOE)
        held = np.where(index >= 0, weights, 0).astype(np.float64)
        magnitude = np.abs(shared.astype(np.float64))
        for route in range(self.size.top_k):
            magnitude += np.abs(held[:, route, None] * rows[index[:, route]].astype(np.float64))
        return reference.finalize(rows, weights, index, shared), magnitude, self.size.top_k + 1


class Mxfp8(Variant):
    """The layer input also as MXFP8, which the plugin writes and the pass does not ask for."""

    name = "mxfp8"
    note = "the unfused form does not quantise"

    def define_fused(self, network: trt.INetworkDefinition) -> None:
        inputs, size = self.add_inputs(network), self.size
        made = plugins.add_boundary_layer(
            network,
            *(inputs[name] for name in ("x", "residual", "post", "comb", "pre", "gamma")),
            tp_size=size.tp_size,
            norm_eps=size.norm_eps,
            quantize=True,
        )
        self.mark(network, {"residual_out": made.residual_out, "layer_input": made.layer_input})
        self.mark(network, {"mxfp8_data": made.mxfp8_data, "mxfp8_scales": made.mxfp8_scales})

    def compare_behind(
        self, feeds: Sequence[Tensors], fused: Sequence[Tensors], unfused: Sequence[Tensors], outcome: Outcome
    ) -> None:
        for rank, out in enumerate(fused):
            data, scales = reference.quantize(out["layer_input"])
            outcome.same(out["mxfp8_data"], data, f"rank {rank}, mxfp8_data")
            outcome.same(out["mxfp8_scales"].view(np.uint8), scales, f"rank {rank}, mxfp8_scales")


class CaptureAux(Variant):
    """The mean of the streams as well, by TensorRT's own layers in both forms."""

    name = "capture_aux"

    def add_behind(self, network: trt.INetworkDefinition, streams: Any) -> dict[str, Any]:
        return {"aux": functional.mean_streams(network, streams)}

    def compare_behind(
        self, feeds: Sequence[Tensors], fused: Sequence[Tensors], unfused: Sequence[Tensors], outcome: Outcome
    ) -> None:
        for form, outputs in (("fused", fused), ("unfused", unfused)):
            for rank, out in enumerate(outputs):
                expected = reference.aux_mean(out["residual_out"])
                magnitude = np.abs(out["residual_out"].astype(np.float64)).mean(axis=1)
                outcome.near(compare.sums_agree(out["aux"], expected, magnitude, HC), f"{form}, rank {rank}, aux")
                outcome.measure(out["aux"], expected)


class CoefficientsBehind(Variant):
    """The mixes of the next sublayer as well: by some hundred layers of TensorRT's own, or by one of this project's."""

    name = "coefficients"
    note = "TensorRT does not get through compiling the unfused form"
    unfused_builds = False
    options = FuseOptions(coefficients=True)
    mixes: ClassVar[dict[str, Any]] = {
        "rms_norm_eps": 1e-20,
        "hc_eps": 1e-6,
        "post_alpha": 2.0,
        "sinkhorn_iters": 20,
    }
    # Largest distances, in ulps of float32, from the float64 result for logits of about 1: twice what the reference in
    # float32 has over many inputs (8, 31 and 8). Either form rounds as often and in no better an order.
    bounds: ClassVar[dict[str, int]] = {"post_out": 16, "comb_out": 62, "pre_out": 16}

    def weights(self) -> tuple[Array, Array, Array]:
        """``fn``, ``scale`` and ``base`` with logits of about 1."""
        rng, features = np.random.default_rng(7), HC * self.size.hidden
        fn: Array = rng.standard_normal((24, features), np.float32) / np.float32(np.sqrt(features))
        return fn, np.array([1.0, 0.7, 1.3], np.float32), rng.standard_normal(24, np.float32)

    def add_behind(self, network: trt.INetworkDefinition, streams: Any) -> dict[str, Any]:
        mixes = functional.mhc_coefficients(network, streams, *self.weights(), **self.mixes)
        return dict(zip(_MIXES, mixes, strict=True))

    def is_fused(self, report: Report) -> bool:
        return super().is_fused(report) and [entry.status for entry in report.coefficients] == ["fused"]

    def compare_behind(
        self, feeds: Sequence[Tensors], fused: Sequence[Tensors], unfused: Sequence[Tensors], outcome: Outcome
    ) -> None:
        for form, outputs in (("fused", fused), ("unfused", unfused)):
            for rank, out in enumerate(outputs):
                exact = reference.coefficients_float64(out["residual_out"], *self.weights(), **self.mixes)
                for name, bound in self.bounds.items():
                    rounded = getattr(exact, name.removesuffix("_out")).astype(np.float32)
                    ulps = np.abs(rounded.view(np.int32).astype(np.int64) - out[name].view(np.int32))
                    if ulps.max() > bound:
                        where = (
                            f"{form}, rank {rank}, {name}: expected within {bound} ulps of float64, got {ulps.max()}"
                        )
                        outcome.details.append(where)
                        outcome.equal &= form != "fused"
                        outcome.agrees &= form != "unfused"


class PublishLinear(Variant):
    """The contribution is the output of a row-parallel linear layer, which stores it into the mailbox itself."""

    name = "publish_linear_bf16"
    options = FuseOptions(publish_linear="bf16")

    def features(self) -> int:
        """A rank's input features: its share of V4.1's output projection of the attention."""
        return 8192 // self.size.tp_size

    @cached_property
    def weight(self) -> Array:
        """[H, K], the same on all ranks."""
        rng, features = np.random.default_rng(11), self.features()
        weight = rng.standard_normal((self.size.hidden, features), np.float32) / np.float32(np.sqrt(features))
        return weight.astype(BFLOAT16)

    def is_fused(self, report: Report) -> bool:
        return [(entry.status, entry.contribution) for entry in report.found] == [("full", "published")]

    def define_fused(self, network: trt.INetworkDefinition) -> None:
        super().define_fused(network)
        layers = (network.get_layer(k) for k in range(network.num_layers))
        (linear,) = [layer for layer in layers if plugins.is_plugin_layer(layer, plugins.PUBLISH_LINEAR)]
        self.mark(network, {"contribution": linear.get_output(0)})

    def add_contribution(self, network: trt.INetworkDefinition, inputs: Mapping[str, Any]) -> Any:
        return functional.linear(network, inputs["activation"], self.weight)

    def own(self, rng: np.random.Generator, rank: int) -> dict[str, Array]:
        return {"activation": _normal(rng, self.size.rows, self.features())}

    def contribution(self, feed: Tensors) -> tuple[Array, Array, int]:
        activation = feed["activation"].astype(np.float64)
        total = (activation @ self._wide.T).astype(np.float32)
        magnitude = np.abs(activation) @ self._magnitudes.T
        return reference.clear_negative_zero(reference.round_bf16(total)), magnitude, self.features()

    @cached_property
    def _wide(self) -> Array:
        return self.weight.astype(np.float64)

    @cached_property
    def _magnitudes(self) -> Array:
        return np.abs(self._wide)


class PublishLinearE4M3(PublishLinear):
    """The same with weights that were E4M3 in blocks of 32 x 32, which the publishing layer reads as such."""

    name = "publish_linear_e4m3"
    options = FuseOptions(publish_linear="e4m3")

    @cached_property
    def weight(self) -> Array:
        weight = super().weight.astype(np.float32)
        hidden, features = weight.shape
        blocks = weight.reshape(hidden // 32, 32, features // 32, 32)
        # A power of two for each block, as a checkpoint's scales are.
        power = np.ceil(np.log2(np.abs(blocks).max(axis=(1, 3), keepdims=True) / 448)).astype(np.int32)
        small = np.ldexp(blocks, -power).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
        rounded: Array = np.ldexp(small, power).reshape(hidden, features).astype(BFLOAT16)
        return rounded


class Published(PublishLinear):
    """What publishing adds: the fused boundary behind TensorRT's own linear layer, and behind the publishing one."""

    name = "published"
    note = "the boundary is fused in the unfused form too"

    def define(self, network: trt.INetworkDefinition, shows_contribution: bool) -> None:
        super().define(network, shows_contribution)
        if shows_contribution:
            fuse_boundaries(network)


_MIXES = ("post_out", "comb_out", "pre_out")
_MOE = ("gemm2_permuted", "expert_weights", "expanded_idx_to_permuted_idx", "shared_output")

#: All variants by name, in the order in which they are shown.
VARIANTS: dict[str, type[Variant]] = {
    each.name: each
    for each in (
        Variant,
        ResidualOnly,
        Finalize,
        Mxfp8,
        CaptureAux,
        CoefficientsBehind,
        PublishLinear,
        PublishLinearE4M3,
        Published,
    )
}


def _normal(rng: np.random.Generator, *shape: int) -> Array:
    return rng.standard_normal(shape, np.float32).astype(BFLOAT16)


def _without_contribution(outputs: Tensors) -> dict[str, Array]:
    return {name: array for name, array in outputs.items() if name != "contribution"}
