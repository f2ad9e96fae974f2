# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.stress --boundaries 100000 --ranks 2,4,8`: boundaries of every kind, at random, all checked."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.stress import run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.stress", description=__doc__)
    parser.add_argument("--boundaries", type=int, default=100_000, help="with thread ranks, for each number of ranks")
    parser.add_argument("--ranks", default="2,4,8", help="numbers of thread ranks")
    parser.add_argument("--process-boundaries", type=int, default=2_000, help="with process ranks; 0: none")
    parser.add_argument("--process-ranks", default="2", help="numbers of process ranks")
    parser.add_argument("--wait-modes", default="auto", help="of the thread ranks: auto, spin, split, gate")
    parser.add_argument("--seed", type=int, help="of everything random; another one every time if left out")
    parser.add_argument("--timeout", type=float, default=20.0, help="seconds that one wait may take")
    parser.add_argument("--output", type=Path, help="the record, JSON")
    arguments = parser.parse_args()

    def counts(text: str) -> list[int]:
        return [int(part) for part in text.split(",") if part]

    record = run.run_all(
        thread_ranks=counts(arguments.ranks),
        boundaries=arguments.boundaries,
        wait_modes=arguments.wait_modes.split(","),
        process_ranks=counts(arguments.process_ranks) if arguments.process_boundaries else [],
        process_boundaries=arguments.process_boundaries,
        seed=arguments.seed,
        timeout_s=arguments.timeout,
        output=arguments.output,
    )
    return 0 if run.passed(record) else 1


if __name__ == "__main__":
    sys.exit(main())
