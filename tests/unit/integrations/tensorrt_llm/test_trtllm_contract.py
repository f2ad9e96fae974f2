# SPDX-License-Identifier: Apache-2.0
"""The double promises nothing that the real TensorRT-LLM does not have: names, parameters, and layer classes."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

DOUBLE = Path(__file__).parent / "double/tensorrt_llm"
OURS = Path(__file__).parents[4] / "trtllm_mhc/integrations/tensorrt_llm"
# Made otherwise in the original, where nothing of ours sees it, or of an instance rather than the class.
INTERNAL = {
    "builder.Engine.__init__",
    "builder.Builder.build_engine",
    "mapping.Mapping.tp_rank",
    "mapping.Mapping.tp_group",
}


def definitions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Functions and methods, with their dotted names."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            for each in node.body:
                if isinstance(each, ast.FunctionDef):
                    yield f"{node.name}.{each.name}", each


def promised() -> list[tuple[str, str, list[str], bool]]:
    """Module, dotted name, positional parameter names and whether it is a property, for all that the double defines."""
    found = []
    for path in sorted(DOUBLE.rglob("*.py")):
        parts = path.relative_to(DOUBLE).with_suffix("").parts
        module = ".".join(["tensorrt_llm", *(part for part in parts if part != "__init__")])
        for name, node in definitions(ast.parse(path.read_text())):
            if f"{'.'.join(parts)}.{name}" in INTERNAL or name.split(".")[0] == "QuantConfig":
                continue
            decorators = {ast.unparse(each).split(".")[-1] for each in node.decorator_list}
            arguments = [each.arg for each in (*node.args.posonlyargs, *node.args.args)]
            if arguments[:1] in (["self"], ["cls"]):
                arguments = arguments[1:]
            found.append((module, name, arguments, bool(decorators & {"property", "setter"})))
    return found


@pytest.fixture(scope="module")
def real(trtllm: Any) -> Any:
    if Path(trtllm.__file__).is_relative_to(DOUBLE):
        pytest.skip("compares with a real TensorRT-LLM, and none can be imported here")
    return trtllm


@pytest.mark.parametrize(("module", "name", "arguments", "is_property"), promised(), ids=lambda each: str(each))
def test_the_original_has_it_too(real: Any, module: str, name: str, arguments: list[str], is_property: bool) -> None:
    found = importlib.import_module(module)
    for part in name.split("."):
        found = inspect.getattr_static(found, part) if is_property else getattr(found, part)
    if is_property:
        assert isinstance(found, property) or not callable(found)
        return
    parameters = inspect.signature(found).parameters.values()
    if not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
        assert set(arguments) <= {each.name for each in parameters}


def imported() -> list[tuple[str, str]]:
    """All that our integration imports from TensorRT-LLM."""
    pairs = []
    for path in OURS.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tensorrt_llm":
                pairs += [(node.module or "", alias.name) for alias in node.names]
    return sorted(set(pairs))


@pytest.mark.parametrize(("module", "name"), imported())
def test_what_the_integration_imports_is_there(trtllm: Any, module: str, name: str) -> None:
    assert hasattr(importlib.import_module(module), name)


def test_integration_imports_something() -> None:
    assert ("tensorrt_llm.graph_rewriting", "Layer") in imported()


def test_layer_classes(real: Any) -> None:
    """The stock passes know all the layer types of our networks, or would end the build."""
    import tensorrt as trt
    from tensorrt_llm.graph_rewriting import Layer

    ours = ("ACTIVATION", "CAST", "CONCATENATION", "CONSTANT", "ELEMENTWISE", "GATHER", "MATRIX_MULTIPLY", "REDUCE")
    for name in (*ours, "SHUFFLE", "SOFTMAX", "UNARY", "PLUGIN_V2"):
        assert getattr(trt.LayerType, name) in Layer.TRT_LAYER_TYPE_TO_LAYER
