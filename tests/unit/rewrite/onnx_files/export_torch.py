# SPDX-License-Identifier: Apache-2.0
"""Writes the .onnx files of this folder: boundaries exported by torch.onnx, for test_rewrite_onnx.py.

The nemo files are of the DeepSeek V4.1 modules of nemo-automodel, an independent implementation; the others are
written by hand. torch, onnxscript and nemo-automodel (installed without its dependencies) are needed here only:

    python tests/unit/rewrite/onnx_files/export_torch.py [FOLDER]
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import onnx
import torch

from trtllm_mhc.integrations.torch_onnx import all_reduce, translation_table

FOLDER = Path(__file__).parent
HC, HIDDEN, TP_SIZE, EPS = 4, 4096, 2, 1e-20


def nemo_layers() -> ModuleType:
    """nemo-automodel's layers of DeepSeek V4.1, without the packages that its __init__ files import."""
    root = Path(importlib.util.find_spec("nemo_automodel").submodule_search_locations[0])
    models = "components/models"
    for path in (
        *("", "shared", "components", models, f"{models}/deepseek_v4", f"{models}/deepseek_v4/kernels"),
        f"{models}/deepseek_v41",
    ):
        package = ModuleType(".".join(["nemo_automodel", *Path(path).parts]))
        package.__path__ = [str(root / path)]
        sys.modules[package.__name__] = package
    config = ModuleType("nemo_automodel.components.models.deepseek_v41.config")
    config.DeepseekV41TextConfig = object
    sys.modules[config.__name__] = config
    return importlib.import_module("nemo_automodel.components.models.deepseek_v41.layers")


class NemoBoundary(torch.nn.Module):
    """All-reduce, expand, collapse with the carried pre-mix, norm: [B, S, ...]."""

    def __init__(self, layers: ModuleType) -> None:
        super().__init__()
        self.connection = layers.DeepseekV41HyperConnection
        self.mix = layers.DeepseekV41Mix
        self.norm = layers.DeepseekV41RMSNorm(HIDDEN, EPS, torch.bfloat16)

    def forward(self, x, residual, post, comb, pre):
        mix = self.mix(pre=None, post=post, comb=comb)
        streams = self.connection.expand(all_reduce(x, TP_SIZE), residual, mix)
        return streams, self.norm(self.connection.collapse(streams, pre))


class NemoLayer(torch.nn.Module):
    """Two sublayers (elementwise stand-ins) with the coefficients computed from the streams."""

    def __init__(self, layers: ModuleType) -> None:
        super().__init__()
        config = SimpleNamespace(
            hc_mult=HC,
            hidden_size=HIDDEN,
            hc_sinkhorn_iters=2,
            hc_eps=1e-6,
            rms_norm_eps=1e-6,
            initializer_range=0.02,
        )
        self.connections = torch.nn.ModuleList(layers.DeepseekV41HyperConnection(config) for _ in range(2))
        self.norms = torch.nn.ModuleList(layers.DeepseekV41RMSNorm(HIDDEN, EPS, torch.bfloat16) for _ in range(2))

    def forward(self, hidden, streams, pre):
        for connection, norm in zip(self.connections, self.norms, strict=True):
            mix = connection(streams)
            streams = connection.expand(all_reduce(hidden * 2, TP_SIZE), streams, mix)
            hidden = norm(connection.collapse(streams, pre))
            pre = mix.pre
        return hidden, streams, pre


class HandWritten(torch.nn.Module):
    """The same boundary with einsum or bmm and torch's own norm: [M, ...]."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.gamma = torch.nn.Parameter(torch.ones(HIDDEN, dtype=torch.bfloat16))

    def forward(self, x, residual, post, comb, pre):
        reduced = all_reduce(x, TP_SIZE).float()
        wide = residual.float()
        if self.form == "einsum":
            mixed = torch.einsum("mji,mjh->mih", comb, wide)
            streams = (post[:, :, None] * reduced[:, None, :] + mixed).bfloat16()
            collapsed = torch.einsum("mi,mih->mh", pre, streams.float()).bfloat16()
        else:
            streams = (torch.bmm(comb.mT, wide) + torch.bmm(post[..., None], reduced[:, None])).bfloat16()
            collapsed = torch.bmm(pre[:, None], streams.float())[:, 0].bfloat16()
        wide = torch.nn.functional.rms_norm(collapsed.float(), (HIDDEN,), self.gamma.float(), EPS)
        return streams, wide.bfloat16()


def boundary_inputs(*lead: int) -> dict[str, torch.Tensor]:
    bf16 = torch.bfloat16
    return {
        "x": torch.zeros(*lead, HIDDEN, dtype=bf16),
        "residual": torch.zeros(*lead, HC, HIDDEN, dtype=bf16),
        "post": torch.zeros(*lead, HC),
        "comb": torch.zeros(*lead, HC, HC),
        "pre": torch.zeros(*lead, HC),
    }


def export(folder: Path, name: str, module: torch.nn.Module, inputs: dict[str, torch.Tensor], outputs: list[str]):
    """Export with dynamic token dimensions and no weights: those are random, and large."""
    last = {"x": 1, "hidden": 1, "post": 1, "pre": 1, "residual": 2, "streams": 2, "comb": 2}
    axes = {n: {axis: "MBS"[axis] for axis in range(v.dim() - last[n])} for n, v in inputs.items()}
    sizes = [torch.export.Dim("batch", min=2), torch.export.Dim("tokens", min=2)]
    dynamic = {n: {axis: sizes[axis] for axis in each} for n, each in axes.items()}
    program = torch.onnx.export(
        module.eval(),
        kwargs=inputs,
        dynamo=True,
        dynamic_shapes=dynamic,
        input_names=list(inputs),
        output_names=outputs,
        custom_translation_table=translation_table(),
        opset_version=18 if name.startswith("nemo") else 23,
    )
    model = program.model_proto
    # Where the exporter was run is nobody's business, and the large weights become inputs of the same name.
    keep = []
    for tensor in model.graph.initializer:
        if len(tensor.raw_data) <= 2**14:
            keep.append(tensor)
        else:
            model.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    del model.graph.initializer[:]
    model.graph.initializer.extend(keep)
    for node in [*model.graph.node, *(n for function in model.functions for n in function.node)]:
        del node.metadata_props[:]
    del model.metadata_props[:]
    del model.graph.metadata_props[:]
    for value in [*model.graph.value_info, *model.graph.input, *model.graph.output]:
        del value.metadata_props[:]
    onnx.save(model, folder / f"{name}.onnx")


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    layers = nemo_layers()
    outputs = ["streams_out", "layer_input"]
    export(folder, "nemo_boundary", NemoBoundary(layers), boundary_inputs(2, 3), outputs)
    inputs = boundary_inputs(2, 3)
    state = {"hidden": inputs["x"], "streams": inputs["residual"], "pre": inputs["pre"]}
    export(folder, "nemo_layer", NemoLayer(layers), state, ["hidden_out", "streams_out", "pre_out"])
    for form in ("einsum", "bmm"):
        export(folder, f"torch_{form}", HandWritten(form), boundary_inputs(3), outputs)


if __name__ == "__main__":
    main()
