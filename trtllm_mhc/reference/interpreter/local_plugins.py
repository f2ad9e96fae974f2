# SPDX-License-Identifier: Apache-2.0
"""This project's plugins that communicate with nobody: ``MhcCoefficients``."""

from __future__ import annotations

from trtllm_mhc.network import plugins
from trtllm_mhc.reference._arrays import AnyArray
from trtllm_mhc.reference.coefficients import coefficients_float32, coefficients_float64

from .rules import Operation, rule


@rule("PLUGIN_V3")
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
