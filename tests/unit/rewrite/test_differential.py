# SPDX-License-Identifier: Apache-2.0
"""Random networks, fused and not, compared (`differential.py` runs as many as one likes); and that it can fail."""

from __future__ import annotations

import pytest

CASES = {"11": 500, "10": 100}  # by TensorRT's major version
SEED = 20261130


@pytest.fixture
def differential(trt, builder):
    import differential

    return differential


@pytest.mark.timeout(900)
def test_random_networks(trt, differential):
    print(f"seed {SEED}")
    cases = CASES[trt.__version__.split(".")[0]]
    tally = differential.run(cases, SEED)
    assert tally.cases >= cases
    assert min(tally.statuses[status] for status in ("full", "residual_only", "refused")) > cases / 5


@pytest.mark.parametrize(
    ("rule", "surroundings"),
    [
        ("_check_reduced", "reader of the sum"),
        ("_check_reduced", "sum is an output"),
        ("_check_reduced", "sum is a debug tensor"),
        ("_check_post", "two posts"),
        ("_check_post", "bias"),
        ("_check_post", "rounded on the way"),
        ("_check_norm", "eps is an input"),
        ("_check_norm", "eps is negative"),
        ("_check_dtypes", "wide gamma"),
        ("_other_arithmetic", "collapse not rounded"),
        ("_other_arithmetic", "mean square of the unrounded"),
        ("depends_on", "new pre"),
    ],
)
def test_notices_a_broken_rule(differential, builder, monkeypatch, rule, surroundings):
    from trtllm_mhc.rewrite import legality
    from trtllm_mhc.rewrite.graph import Graph

    case = differential.Case((differential.Part(differential.rewrite_forms.Form(), surroundings),), 2, 0)
    differential.check(case, builder)
    if rule == "depends_on":
        monkeypatch.setattr(Graph, rule, lambda *arguments: False)
        monkeypatch.setattr(legality, "refuse_cycles", lambda *arguments: None)
        monkeypatch.setattr(legality, "refuse_unordered", lambda *arguments: None)
    else:
        nothing = None if rule == "_other_arithmetic" else ()
        monkeypatch.setattr(legality, rule, lambda *arguments: nothing)
    with pytest.raises((AssertionError, TypeError, ValueError)):
        differential.check(case, builder)
