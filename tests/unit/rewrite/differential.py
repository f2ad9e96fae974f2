# SPDX-License-Identifier: Apache-2.0
"""Differential test of the rewrite pass: random networks, fused and not, evaluated by numpy and compared.

A case is a chain of boundaries, each in a random form and with random surroundings, some of which make fusing it
illegal. The case knows which; the pass has to find out.

    python tests/unit/rewrite/differential.py --cases 10000 --seed 1 --record tests/results/differential.json
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import ml_dtypes
import numpy as np
import rewrite_forms
import tensorrt as trt
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from trtllm_mhc import plugin
from trtllm_mhc.network import ops
from trtllm_mhc.reference import ulp_distance
from trtllm_mhc.reference.interpreter import evaluate
from trtllm_mhc.rewrite import FuseOptions, fuse_boundaries

HAS_COLLECTIVES = hasattr(trt, "IDistCollectiveLayer")
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

#: What stands around a boundary, and what becomes of it.
SURROUNDINGS = {
    "nothing": "full",
    "streams are an output": "full",
    "mean of the streams": "full",
    "injection beside": "full",
    "collapsed value has a reader": "full",
    "two entries": "full",
    "dead reader of the sum": "full",
    "coefficients shared": "full",
    "injection before the collapse": "residual_only",
    "no collapse": "residual_only",
    "no norm": "residual_only",
    "collapse not rounded": "residual_only",
    "mean square of the unrounded": "residual_only",
    "reader of the sum": "refused",
    "reader of the widened sum": "refused",
    "sum is an output": "refused",
    "sum is a debug tensor": "refused",
    "two posts": "refused",
    "bias": "refused",
    "rounded on the way": "refused",
    "new pre": "refused",
    "layer norm": "refused",
    "eps is an input": "refused",
    "eps is negative": "refused",
    "wide gamma": "refused",
}


@dataclass(frozen=True)
class Part:
    """One boundary of a case."""

    form: rewrite_forms.Form
    surroundings: str

    @property
    def status(self) -> str:
        """What the pass is to do."""
        expected = SURROUNDINGS[self.surroundings]
        collapses = self.surroundings not in ("no collapse", "injection before the collapse", "two entries")
        if expected == "full" and collapses and self.form.collapse == "adds":
            return "residual_only"
        if self.surroundings == "two entries" and self.form.collapse == "adds":
            return "residual_only"
        # A norm is judged only where the collapse before it is the fused one's.
        if self.form.collapse == "adds" and self.surroundings in ("eps is an input", "eps is negative", "wide gamma"):
            return "residual_only"
        return expected


@dataclass(frozen=True)
class Case:
    """A network: boundaries in a chain, and numbers for its inputs."""

    parts: tuple[Part, ...]
    tp_size: int
    numbers: int
    publish_linear: str = "off"

    @property
    def contribution(self) -> str:
        """What the first boundary is to take from a rank, if it is fused."""
        form = self.parts[0].form
        if form.linear is not None and self.publish_linear != "off":
            return "published"
        return "plain" if form.finalize is None else "finalize"

    @property
    def statuses(self) -> list[str]:
        """What the pass is to do with each boundary."""
        return [part.status for part in self.parts]


@dataclass
class Tally:
    """What a run has seen."""

    cases: int = 0
    statuses: Counter[str] = field(default_factory=Counter)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Random cases."""
    tp_size = draw(st.sampled_from([1, 2]))
    batch = draw(st.sampled_from(rewrite_forms.BATCHES))
    all_reduces = ["plugin", "dist_collective"] if HAS_COLLECTIVES else ["plugin"]
    parts = []
    for _ in range(draw(st.integers(1, 3))):
        form = rewrite_forms.Form(
            all_reduce=draw(st.sampled_from(all_reduces)),
            post=draw(st.sampled_from(rewrite_forms.POSTS)),
            collapse=draw(st.sampled_from(rewrite_forms.COLLAPSES)),
            norm=draw(st.sampled_from(rewrite_forms.NORMS)),
            comb=draw(st.sampled_from(["source_target", "target_source"])),
            batch=batch,
            eps=draw(st.sampled_from([0.0, 1e-20, 1e-6])),
            tp_size=tp_size,
        )
        if not parts:
            # Only the first one's input has to come from somewhere.
            end = draw(st.sampled_from(["x", "finalize", "linear"]))
            if end == "finalize":
                form = form.with_(finalize=draw(st.sampled_from(rewrite_forms.FINALIZES)))
            elif end == "linear":
                form = form.with_(linear=draw(st.sampled_from(rewrite_forms.LINEARS)))
        parts.append(Part(form, draw(st.sampled_from(sorted(SURROUNDINGS)))))
    publish_linear = draw(st.sampled_from(["off", "bf16", "e4m3"]))
    return Case(tuple(parts), tp_size, draw(st.integers(0, 2**31)), publish_linear)


def write(network: trt.INetworkDefinition, case: Case) -> dict[str, int]:
    """Write a case; returns the outputs' names with the ulps by which fusing may change them."""
    first = rewrite_forms.Writer(network, case.parts[0].form)
    inputs = first.inputs()
    ulps: dict[str, int] = {}
    for number, part in enumerate(case.parts):
        streams = _write_part(network, part, inputs, number, ulps)
        # The next sublayer's output: exact in bfloat16, and waits for this boundary.
        x = first.pick(streams, first.lead, 0, keep=False)
        inputs = {**inputs, "x": x, "residual": streams}
    return ulps


def _write_part(network, part: Part, inputs, number: int, ulps: dict[str, int]):
    """Write one boundary with its surroundings, as outputs with the number in their names; returns its streams."""
    w = rewrite_forms.Writer(network, part.form)
    around, lead = part.surroundings, w.lead
    narrow = w.narrow

    def output(name, tensor, allowed=0):
        name = f"{name}_{number}"
        w.output(**{name: tensor})
        ulps[name] = allowed

    post, comb, pre, gamma = (inputs[name] for name in ("post", "comb", "pre", "gamma"))
    if around == "coefficients shared":
        pre = post
    x = inputs.get("x")
    if x is None and "activation" in inputs:
        x = w.linear(inputs["activation"])
    elif x is None:
        x = w.finalize(*(inputs[name] for name in ("gemm2_permuted", "expert_weights", "index", "shared_output")))
    reduced = w.all_reduce(x)
    if around == "reader of the sum":
        output("reader", w.mul(reduced, reduced))
    elif around == "dead reader of the sum":
        w.mul(reduced, reduced)
    elif around == "sum is an output":
        output("sum", reduced)
    elif around == "sum is a debug tensor":
        network.mark_debug(reduced)
    elif around == "reader of the widened sum":
        wide = w.wide(reduced)
        output("reader", w.narrow(w.mul(wide, wide)))
        w.wide = lambda x: wide if x is reduced else rewrite_forms.Writer.wide(w, x)
    elif around == "rounded on the way":
        rounded = w.narrow(w.mul(w.wide(reduced), w.scalar(1.0, lead + 1)))
        factor = w.mul(w.unsqueeze(w.wide(rounded), lead), w.scalar(1.0, lead + 2))
        own = w.narrow(w.mul(factor, w.unsqueeze(post, lead + 1)))
        across = "NONE" if part.form.comb == "target_source" else "TRANSPOSE"
        mixed = w.matmul(comb, across, w.wide(inputs["residual"]), "NONE")
        streams = w.narrow(w.add(w.wide(own), mixed))
        output("streams", streams)
        return streams
    mixed_in = reduced
    if around == "bias":
        ones = np.ones((1,) * lead + (part.form.hidden,), BFLOAT16)
        mixed_in = w.add(reduced, ops.constant(network, ones))
    streams = w.post(mixed_in, inputs["residual"], post, comb)
    if around == "two posts":
        output("second", w.post(mixed_in, inputs["residual"], pre, comb))

    full = part.status == "full"
    allowed = (2 if part.form.norm == "scale_after" else 1) if full else 0
    if around == "streams are an output":
        output("streams", streams)
    elif around == "mean of the streams":
        output("aux", w.narrow(w.mul(w.sum(w.wide(streams), lead), w.scalar(0.25, lead + 1))))
    injected = streams
    if around in ("injection beside", "injection before the collapse"):
        injected = w.narrow(w.add(w.wide(streams), w.scalar(1.0, lead + 2)))
        output("injected", injected)
    if around == "no collapse":
        output("streams", streams)
        return streams
    if around == "new pre":
        pre = w.sum(w.wide(streams), -1, operation=trt.ReduceOperation.AVG)
    if around in ("collapse not rounded", "mean square of the unrounded"):
        w.narrow = lambda x: x
    collapsed = w.collapse(injected if around == "injection before the collapse" else streams, pre)
    w.narrow = narrow
    if around == "mean square of the unrounded":
        mean_square = w.mean_square(collapsed)
        w.mean_square = lambda wide: mean_square
        collapsed = w.narrow(collapsed)
    if around in ("no norm", "collapsed value has a reader"):
        output("collapsed", collapsed)
    if around == "no norm":
        return streams
    if around == "eps is an input":
        w.form = part.form.with_(norm="recip_sqrt")
        eps = network.add_input(f"eps_{number}", trt.float32, (1,) * (lead + 1))
        w.scalar = lambda value, rank: eps
    elif around == "eps is negative":
        w.form = part.form.with_(eps=-1e-6)
    elif around == "wide gamma":
        gamma = network.add_input(f"gamma_{number}", trt.float32, (part.form.hidden,))
        w.form = part.form.with_(norm="div_sqrt")
    if around == "layer norm":
        scale = w.wide(ops.reshape(network, gamma, (1,) * lead + (part.form.hidden,)))
        zeros = ops.constant(network, np.zeros((1,) * lead + (part.form.hidden,), np.float32))
        layer = network.add_normalization(w.wide(collapsed), scale, zeros, 1 << lead)
        output("layer_input", w.narrow(ops.output(layer, "normalization")))
    else:
        output("layer_input", w.norm(collapsed, gamma), allowed)
    if around == "two entries":
        output("second_input", w.norm(w.collapse(streams, post), gamma), allowed)
    return injected if around == "injection beside" else streams


def feeds(case: Case, networks) -> list[dict[str, np.ndarray]]:
    """Numbers for the inputs of a case's networks."""
    form = case.parts[0].form
    result = rewrite_forms.feeds(form, seed=case.numbers)
    for feed, network in zip(result, networks, strict=True):
        for k in range(network.num_inputs):
            tensor = network.get_input(k)
            if tensor.name not in feed:
                feed[tensor.name] = np.full(tuple(tensor.shape), 1e-6, np.float32)
        for name in set(feed) - {network.get_input(k).name for k in range(network.num_inputs)}:
            del feed[name]
    return result


def check(case: Case, builder: trt.Builder, tally: Tally | None = None) -> None:
    """Fuse a case and compare; AssertionError where the pass did something else than the case expects."""
    flags = 0
    if hasattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED"):
        flags = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    unfused, fused = ([builder.create_network(flags) for _ in range(case.tp_size)] for _ in range(2))
    for network in unfused + fused:
        ulps = write(network, case)
    before = [rewrite_forms.snapshot(network) for network in fused]
    options = FuseOptions(publish_linear=case.publish_linear)
    reports = [fuse_boundaries(network, options) for network in fused]
    assert all(report == reports[0] for report in reports)
    found = [entry.status for entry in reports[0].found]
    assert found == case.statuses, (found, case.statuses, [entry.reasons for entry in reports[0].found])
    assert reports[0].found[0].contribution == ("plain" if found[0] == "refused" else case.contribution)
    if set(found) == {"refused"}:
        assert [rewrite_forms.snapshot(network) for network in fused] == before
    numbers = feeds(case, unfused)
    old, new = evaluate(unfused, numbers), evaluate(fused, numbers)
    for ours, theirs in zip(new, old, strict=True):
        assert list(ours) == list(theirs) == list(ulps)
        for name, allowed in ulps.items():
            # Zeros of either sign are equal: the sign of an exact zero depends on the order of the sum.
            distance = int(ulp_distance(ours[name], theirs[name]).max())
            assert distance <= allowed, f"{name}: {distance} ulp"
    again = fuse_boundaries(fused[0], options)
    assert [entry.status for entry in again.found] == ["refused"] * found.count("refused")
    if tally is not None:
        tally.cases += 1
        tally.statuses.update(found)


def run(count: int, first_seed: int) -> Tally:
    """Check ``count`` random cases."""
    plugin.load()
    builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
    tally = Tally()

    @seed(first_seed)
    @settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(cases())
    def body(case: Case) -> None:
        check(case, builder, tally)

    body()
    return tally


def main() -> None:
    """Run from the command line and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=10000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--record", type=Path)
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}, {arguments.cases} cases, TensorRT {trt.__version__}", flush=True)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    tally = run(arguments.cases, arguments.seed)
    record = {
        "cases": tally.cases,
        "fused": tally.statuses["full"] + tally.statuses["residual_only"],
        "fused_full": tally.statuses["full"],
        "fused_residual_only": tally.statuses["residual_only"],
        "refused": tally.statuses["refused"],
        "mismatches": 0,  # the first one ends the run
        "seed": arguments.seed,
        "tensorrt": trt.__version__,
        "commit": commit,
    }
    print(json.dumps(record, indent=2))
    if arguments.record is not None:
        arguments.record.parent.mkdir(parents=True, exist_ok=True)
        arguments.record.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
