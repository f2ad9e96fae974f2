# SPDX-License-Identifier: Apache-2.0
"""Showing where a long command is."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape


class Steps:
    """Prints each step when it begins (on a terminal as a spinner) and how long it took when it ends.

    Attributes:
        seconds: step to duration.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.seconds: dict[str, float] = {}
        self._begin = time.perf_counter()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def step(self, text: str) -> Iterator[None]:
        """Wraps one step."""
        begin = time.perf_counter()
        if self.console.is_terminal:
            with self.console.status(f"{escape(text)} ..."):
                yield
        else:
            self.console.print(f"[dim]{self._clock()}[/] {escape(text)} ...")
            yield
        self.seconds[text] = round(time.perf_counter() - begin, 3)
        self.console.print(f"[dim]{self._clock()}[/] {escape(text)}: {self.seconds[text]:.1f} s")

    def say(self, text: str) -> None:
        """A line in between, from any thread."""
        with self._lock:
            self.console.print(f"[dim]{self._clock()}[/]   {escape(text)}")

    def _clock(self) -> str:
        return f"{time.perf_counter() - self._begin:6.1f}"
