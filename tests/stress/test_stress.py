# SPDX-License-Identifier: Apache-2.0
"""A short stress run of each kind; `python -m tests.stress` makes long ones."""

from __future__ import annotations

import random

import pytest

from tests.stress import run

SEED = random.randrange(2**31)


@pytest.mark.parametrize(("tp", "wait_mode"), [(2, "auto"), (4, "auto"), (8, "auto"), (2, "spin"), (2, "split")])
def test_thread_ranks(tp: int, wait_mode: str) -> None:
    print(f"seed {SEED}")
    entry = run.run_threads(tp, 2_000, SEED, wait_mode)
    assert run.passed({"runs": [entry]}), entry
    assert entry["boundaries"] >= 2_000


def test_process_ranks() -> None:
    print(f"seed {SEED}")
    entry = run.run_processes(2, 100, SEED)
    assert run.passed({"runs": [entry]}), entry
