# SPDX-License-Identifier: Apache-2.0
"""Every variant of the boundary in engines: eager and in graphs, with the outputs' memory poisoned first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from trtllm_mhc.runtime.threads import ThreadGroup

ROWS = 8
NAMES = (
    *("plain", "residual_only", "finalize", "mxfp8", "capture_aux", "coefficients"),
    *("publish_linear_bf16", "publish_linear_e4m3", "published"),
)
TIMEOUT_S = 20.0


@pytest.fixture(scope="module")
def cache(trt: Any) -> Any:
    from trtllm_mhc.runtime.build import TimingCache

    return TimingCache()


@pytest.fixture
def engines(trt: Any, cache: Any) -> Iterator[Any]:
    """Builds a variant's fused form for a number of ranks; gives the variant and the loaded engines."""
    from contextlib import ExitStack

    from trtllm_mhc.runtime.build import RowRange, build_engine
    from trtllm_mhc.runtime.engine import EngineGroup, communicators
    from trtllm_mhc.verification.variants import VARIANTS, Size

    with ExitStack() as stack:

        def load(name: str, tp: int) -> tuple[Any, Any]:
            variant = VARIANTS[name](Size(tp, ROWS))
            job = variant.fused()
            plan = build_engine(lambda network: job.populate(network, 0), rows=RowRange(1, 4, ROWS), timing_cache=cache)
            group = ThreadGroup.on_devices(tp)
            comms = stack.enter_context(communicators(group, name, hidden_size=5120, timeout_s=TIMEOUT_S))
            return variant, stack.enter_context(EngineGroup([plan] * tp, comms, group))

        yield load


@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize("name", NAMES)
def test_reference_s_bits(engines: Any, name: str, tp: int) -> None:
    """The fused form against the reference; the unfused one is `trtllm-mhc demo --variant all`."""
    from trtllm_mhc.verification.variants import VARIANTS, Size

    _, group = engines(name, tp)
    for rows in (ROWS, 3):
        variant = VARIANTS[name](Size(tp, rows))
        sets = [variant.feeds(seed) for seed in range(2)]
        for feeds in sets:
            group.prepare(feeds)
            group.poison_outputs()
            outputs = group.run_prepared()
            outcome = variant.compare(feeds, outputs, outputs)
            assert (outcome.equal, outcome.agrees) == (True, True), outcome.details
        group.capture(passes=2)
        for replay in range(3):
            group.poison_outputs()
            outputs = group.replay(sets[replay % 2])
            outcome = variant.compare(sets[replay % 2], outputs, outputs)
            assert (outcome.equal, outcome.agrees) == (True, True), outcome.details


def test_every_variant_is_tested(trt: Any) -> None:
    from trtllm_mhc.verification.variants import VARIANTS

    assert tuple(VARIANTS) == NAMES
