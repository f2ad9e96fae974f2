# SPDX-License-Identifier: Apache-2.0
import tensorrt as trt

from ._common import default_net


class Layer:
    TRT_LAYER_TYPE_TO_LAYER = {  # noqa: RUF012
        trt.LayerType.ACTIVATION: trt.IActivationLayer,
        trt.LayerType.CAST: trt.ICastLayer,
        trt.LayerType.CONCATENATION: trt.IConcatenationLayer,
        trt.LayerType.CONSTANT: trt.IConstantLayer,
        trt.LayerType.ELEMENTWISE: trt.IElementWiseLayer,
        trt.LayerType.GATHER: trt.IGatherLayer,
        trt.LayerType.MATRIX_MULTIPLY: trt.IMatrixMultiplyLayer,
        trt.LayerType.PLUGIN_V2: trt.IPluginV2Layer,
        trt.LayerType.REDUCE: trt.IReduceLayer,
        trt.LayerType.SHUFFLE: trt.IShuffleLayer,
        trt.LayerType.SOFTMAX: trt.ISoftMaxLayer,
        trt.LayerType.UNARY: trt.IUnaryLayer,
    }

    def __init__(self, network, trt_layer):
        self._network = network
        self.trt_layer = trt_layer

    def get_inputs(self, *indices):
        from .functional import Tensor

        tensors = [self.trt_layer.get_input(k) for k in indices or range(self.trt_layer.num_inputs)]
        return [Tensor(trt_tensor=t, network=self._network, is_network_input=False) for t in tensors if t is not None]

    def get_outputs(self, *indices):
        from .functional import Tensor

        tensors = [self.trt_layer.get_output(k) for k in indices or range(self.trt_layer.num_outputs)]
        return [Tensor(trt_tensor=tensor, network=self._network, is_network_input=False) for tensor in tensors]

    def is_removed(self):
        return self._network.is_removed_layer(self)

    def mark_as_removed(self):
        assert default_net() is self._network
        self._network.mark_removed_layer(self)

    def as_layer(self):
        if self.type in self.TRT_LAYER_TYPE_TO_LAYER:
            self.trt_layer.__class__ = self.TRT_LAYER_TYPE_TO_LAYER[self.type]
            return self.trt_layer
        raise NotImplementedError(f"Unknown layer type: {self.type}")

    def __getattr__(self, name):
        return getattr(self.trt_layer, name)


def optimize(net):
    """The stock pass asks every layer for its class; it has nothing to do in networks without attention plugins."""
    for layer in net.get_layers():
        if not layer.is_removed():
            layer.as_layer()
