# SPDX-License-Identifier: Apache-2.0
"""The rewrite pass on .onnx files."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import onnx_ir as ir

from trtllm_mhc.rewrite.onnx.rewire import fuse_model
from trtllm_mhc.rewrite.plan import FuseOptions
from trtllm_mhc.rewrite.report import Report


def rewrite_file(source: Path, target: Path, options: FuseOptions | None = None) -> Report:
    """Fuse the boundaries of the model ``source`` and write it to ``target``, which may be the same file.

    Weights in files of their own stay there if ``target`` is in the same folder. Else they are copied, one at a time,
    to one file beside it, ``<target>.data``. They are never all in memory, so that models may be larger than 2 GB. A
    model in which nothing is fused is written as it was.

    Raises:
        FileNotFoundError: there is no ``source``, or a file of its weights is missing.
        ValueError: it is no ONNX model, has no outputs or an opset before 18.
    """
    model = load(source)
    report = fuse_model(model, options)
    if not report.fused:
        model = load(source)
    if source.resolve() == target.resolve() and not report.fused:
        return report
    same_folder = source.resolve().parent == target.resolve().parent
    external = None if same_folder or not _has_external_data(model) else f"{target.name}.data"
    if external is None and not report.fused:
        shutil.copyfile(source, target)
        return report
    # The new file appears at once and whole: the source may be what it replaces.
    with tempfile.TemporaryDirectory(dir=target.resolve().parent, prefix=f".{target.name}.") as folder:
        written = Path(folder, target.name)
        try:
            ir.save(model, written, format="protobuf", external_data=external)
        except ValueError as error:
            raise ValueError(f"{target}: {error}") from error
        if external is not None and Path(folder, external).exists():
            os.replace(Path(folder, external), target.resolve().parent / external)
        os.replace(written, target)
    return report


def load(path: Path) -> ir.Model:
    """The model in a file, its external weights left where they are.

    Raises:
        FileNotFoundError: there is no such file, or a file of its weights is missing.
        ValueError: it is no ONNX model.
    """
    if not path.is_file():
        raise FileNotFoundError(f"expected an ONNX file, got {path}, which does not exist")
    try:
        model = ir.load(path, format="protobuf")
    except Exception as error:  # protobuf's own error, or whatever onnx-ir stumbles over in a file of another kind
        raise ValueError(f"expected an ONNX model in {path}: {error}") from error
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if isinstance(tensor, ir.ExternalTensor) and not Path(tensor.path).is_file():
            raise FileNotFoundError(f"{path}: expected the weights of {value.name!r} in {tensor.path}")
    return model


def _has_external_data(model: ir.Model) -> bool:
    return any(
        isinstance(value.const_value, ir.ExternalTensor)
        for graph in model.graphs()
        for value in graph.initializers.values()
    )
