# SPDX-License-Identifier: Apache-2.0
"""Typed access to the layers of a TensorRT network.

``INetworkDefinition`` hands layers out as plain ``ILayer`` objects, which lack the attributes of their kind (the
operation of an elementwise layer, the axes of a reduction, ...). :func:`downcast` gives them back.
"""

from functools import cache
from typing import Any

import tensorrt as trt

# The layer types whose class is not named after them.
_IRREGULAR = {
    "CONDITIONAL_INPUT": "IIfConditionalInputLayer",
    "CONDITIONAL_OUTPUT": "IIfConditionalOutputLayer",
}


@cache
def _layer_classes() -> dict[Any, type]:
    """Layer type to Python class, for every pair that the loaded TensorRT has.

    The set grows with each TensorRT release, so it is read from the module: ``MATRIX_MULTIPLY`` belongs to
    ``IMatrixMultiplyLayer`` because the two names agree but for case, underscores and affixes.
    """
    by_name = {
        name[1:].removesuffix("Layer").upper(): value
        for name, value in vars(trt).items()
        if isinstance(value, type) and issubclass(value, trt.ILayer) and value is not trt.ILayer
    }
    classes = {}
    for name, layer_type in trt.LayerType.__members__.items():
        irregular = _IRREGULAR.get(name)
        found = getattr(trt, irregular, None) if irregular else by_name.get(name.replace("_", ""))
        if found is not None:
            classes[layer_type] = found
    return classes


def downcast(layer: Any) -> Any:
    """Give ``layer`` the class of its layer type and return it, for example ``IElementWiseLayer`` for an elementwise one.

    The same object is returned: the bindings' layer classes are views of one C++ pointer, so changing the Python class
    reveals the attributes and changes nothing in the network. A layer that already has its class, or whose type has
    none in the loaded TensorRT (``LayerType.PLUGIN``), is returned as it is.
    """
    if type(layer) is trt.ILayer:
        found = _layer_classes().get(layer.type)
        if found is not None:
            layer.__class__ = found
    return layer
