# SPDX-License-Identifier: Apache-2.0
from ._common import default_net
from .functional import allreduce, cast, matmul
from .module import Module
from .parameter import Parameter


class RowLinear(Module):
    def __init__(self, in_features, out_features, bias=True, dtype=None, tp_group=None, tp_size=1):
        super().__init__()
        self.weight = Parameter(shape=(out_features, in_features // tp_size), dtype=dtype)
        if bias:
            self.bias = Parameter(shape=(out_features,), dtype=dtype)
        else:
            self.register_parameter("bias", None)
        self.tp_size = tp_size
        self.tp_group = tp_group

    def forward(self, x, lora_runtime_params=None, lora_hidden_state=None, **kwargs):
        x = matmul(x, self.weight.get_constant_tensor(network=default_net()), transb=True)
        if self.tp_size > 1 and self.tp_group is not None:
            x = allreduce(x, self.tp_group, all_reduce_params=kwargs.get("all_reduce_params"))
        return x if self.bias is None else x + cast(self.bias.value, x.dtype)
