# SPDX-License-Identifier: Apache-2.0
"""Writes docs/rewrite_forms.md: every form of a boundary that the tests write, and what the pass makes of it.

scripts/with_tensorrt.sh 11.2 .venv/bin/python tests/unit/rewrite/forms_table.py
"""

from __future__ import annotations

from pathlib import Path

import rewrite_forms
import tensorrt as trt

from trtllm_mhc import plugin
from trtllm_mhc.rewrite import FuseOptions, fuse_boundaries

PATH = Path(__file__).parents[3] / "docs" / "rewrite_forms.md"

HEADING = """<!-- Written by tests/unit/rewrite/forms_table.py; a test compares it. -->
# Forms that the rewrite pass recognises

`trtllm_mhc.rewrite.fuse_boundaries` goes by what layers compute, not by their names or order. Each row below is a
network that the tests build, fuse and evaluate before and after.

The all-reduce may be this project's `MhcAllReduce`, TensorRT 11's `DIST_COLLECTIVE` (labelled as a sum with
`label_all_reduce_sum`, or vouched for in `FuseOptions`: TensorRT does not give its operation back), or TensorRT-LLM's
`AllReduce` plugin with one output (its group is passed in `FuseOptions`). All forms are taken in float32 and rounded to
bfloat16 where the fused boundary rounds: after the all-reduce, the post-mix, the collapse and the norm. A form that
rounds elsewhere is refused, or fused as the table says; the notes say how far fused values may be from unfused ones.

The end of a MoE before the all-reduce (`finalize`) becomes part of the boundary where it is proven, by the values that
its masks take, that an index of -1 adds nothing and every other index picks its own row; up to 16 routes. Where it is
not, or the sum is rounded in between, has no shared experts or another reader, the boundary is fused on the finalized
tensor and the report says why. `FuseOptions(finalize=False)` switches it off.

The row-parallel linear layer before the all-reduce (`linear`) becomes an `MhcPublishLinear`, and its boundary one that
takes what that layer has stored into the mailbox, with `FuseOptions(publish_linear="bf16")`: where its weight is a
constant, nothing else reads its output, K is a multiple of 128, and no other user of the mailbox can come between the
two. With `"e4m3"`, bfloat16 weights that are exactly E4M3 in blocks of 32 x 32 with a power of two each (dequantised
ones) are stored so again. Off by default. Not in ONNX models, whose weights are left alone.

The native layers of a sublayer's mixes become an `MhcCoefficients` with `FuseOptions(coefficients=True)`: the
projection by a constant (stored either way), scales and offsets, sigmoids, softmax and Sinkhorn rounds, if nothing
reads what is in between.

A dynamic MXFP8 quantisation of the layer input stays a layer of TensorRT, with a note in the report: the plugin can
write MXFP8, but its scales are swizzled words of int32, which no layer of TensorRT reads.
"""

FORMS = {
    "post": {
        "reduce": "products, summed by a reduction",
        "einsum": "einsum of `comb` and the streams",
        "matmul": "`comb` transposed times the streams; outer product for the sublayer's output",
        "matmul_wide": "streams transposed times `comb`, then transposed back",
        "adds": "products of slices, added one by one",
        "per_target": "each target stream by itself, then concatenated",
        "squeeze": "reduction that keeps the axis, then a squeeze",
        "repeat": "streams repeated for each target before the products",
    },
    "comb": {
        "source_target": "`comb` stored [source, target]",
        "target_source": "`comb` stored [target, source]; transposed for the plugin",
    },
    "collapse": {
        "reduce": "products, summed by a reduction",
        "einsum": "einsum of `pre` and the streams",
        "matmul": "`pre` as a row times the streams",
        "matmul_column": "streams transposed times `pre` as a column",
        "matmul_vector": "streams transposed times `pre` as a vector",
        "mean": "mean of the products, times their number",
        "adds": "products of slices, added one by one",
    },
    "norm": {
        "recip_sqrt": "`x * recip(sqrt(mean(x * x) + eps)) * gamma`",
        "pow": "`pow(mean + eps, -0.5)`",
        "div_sqrt": "`x / sqrt(mean + eps)`",
        "one_over": "`x * (1 / sqrt(mean + eps))`",
        "sum_div": "mean as a sum divided by H",
        "sum_mul": "mean as a sum times 1 / H",
        "pow_square": "square as `pow(x, 2)`",
        "gamma_first": "`gamma * (x * inverse)`",
        "scale_after": "normalised value rounded before `gamma`",
    },
    "finalize": {
        "adds": "rows gathered, weighted, chosen against 0 for indices below 0, added route by route, shared last",
        "reduce": "products summed by a reduction",
        "einsum": "einsum of weights and masked rows",
        "matmul": "weights as a row times the masked rows",
        "shared_first": "the shared experts' output first",
        "reversed": "routes in another order",
        "rows_masked": "rows chosen against 0 before the product",
        "rows_masked_narrow": "the same in bfloat16",
        "weights_masked": "weights chosen against 0",
        "weights_multiplied": "weights times the mask as a number",
        "columns": "a gather for each route",
        "not_less": "mask `not (index < 0)`, and choice of 0 where it is less",
        "not_equal": "mask `not (index == -1)`",
        "chosen_index": "index clamped by a choice",
    },
    "linear": {
        "transposed": "weight [H, K], transposed by the matrix product",
        "columns": "weight [K, H]",
        "reshaped_weight": "weight reshaped",
    },
    "batch": {
        "rows": "[M, ...]",
        "batch_sequence": "[B, S, ...], reshaped around the plugin",
        "one_batch": "[1, S, ...]",
        "static": "[M, ...] with M a number",
    },
}


def render(builder: trt.Builder) -> str:
    """The document."""
    lines = [HEADING, "| part | written as | becomes | note |", "|---|---|---|---|"]
    notes: dict[str, int] = {}
    for part, forms in FORMS.items():
        for form, text in forms.items():
            network = builder.create_network(_flags())
            rewrite_forms.write_boundary(network, rewrite_forms.Form().with_(**{part: form}))
            (entry,) = fuse_boundaries(network, FuseOptions(publish_linear="bf16" if part == "linear" else "off")).found
            assert entry.contribution == {"finalize": "finalize", "linear": "published"}.get(part, "plain")
            about = next((each for each in entry.exactness if each.startswith(_ABOUT[part])), "")
            about = about.partition(": ")[2] or "the collapse " + entry.notes[0].what.split("'")[-1].strip()
            number = notes.setdefault(about, len(notes) + 1)
            lines.append(f"| {part} | {text} | {entry.status.replace('_', '-')} | {number} |")
    lines += ["", "Notes:", ""]
    lines += [f"{number}. {text[0].upper()}{text[1:].rstrip('.')}." for text, number in notes.items()]
    return "\n".join(lines) + "\n"


_ABOUT = {"post": "streams", "comb": "streams", "collapse": "collapse", "norm": "layer input", "batch": "streams"}
_ABOUT |= {"finalize": "MoE output", "linear": "linear layer"}


def _flags() -> int:
    flag = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    return 0 if flag is None else 1 << int(flag)


if __name__ == "__main__":
    plugin.load()
    PATH.write_text(render(trt.Builder(trt.Logger(trt.Logger.ERROR))))
