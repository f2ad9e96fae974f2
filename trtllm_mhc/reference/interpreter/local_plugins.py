# SPDX-License-Identifier: Apache-2.0
"""This project's plugins that wait for nobody: ``MhcCoefficients`` and ``MhcPublishLinear``."""

from __future__ import annotations

from trtllm_mhc.network import plugins
from trtllm_mhc.reference._arrays import AnyArray
from trtllm_mhc.reference.coefficients import coefficients_float32, coefficients_float64
from trtllm_mhc.reference.publish_linear import publish_linear, publish_linear_float64, unpack_weight_scales

from .rules import Operation, rule


@rule("PLUGIN_V3")
def _plugin(op: Operation) -> tuple[AnyArray, ...]:
    if plugins.is_plugin_layer(op.layer, plugins.PUBLISH_LINEAR):
        return _publish_linear(op)
    return _coefficients(op)


def _publish_linear(op: Operation) -> tuple[AnyArray]:
    """The values; what the mailbox gets as well is the same tensor."""
    activation, weight = op.value(0), op.raw(1)
    scales = unpack_weight_scales(op.value(2)) if op.layer.num_inputs > 2 else None
    evaluate = publish_linear_float64 if op.arithmetic.exact else publish_linear
    return (evaluate(activation, weight, scales),)


def _coefficients(op: Operation) -> tuple[AnyArray, ...]:
    fields = plugins.read_fields(op.layer)
    evaluate = coefficients_float64 if op.arithmetic.exact else coefficients_float32
    return evaluate(
        *(op.value(i) for i in range(4)),
        rms_norm_eps=fields["rms_norm_eps"],
        hc_eps=fields["hc_eps"],
        post_alpha=fields["post_alpha"],
        sinkhorn_iters=fields["sinkhorn_iters"],
    )
