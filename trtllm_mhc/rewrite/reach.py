# SPDX-License-Identifier: Apache-2.0
"""Where a tensor leads to, through the arithmetic of a boundary."""

from __future__ import annotations

from collections.abc import Iterator

from trtllm_mhc.rewrite.graph import Op, Value

#: Layers that may lie between an all-reduce and the streams, or between the streams and a sublayer's input.
_PATH = {
    *(Op.CAST, Op.IDENTITY, Op.ADD, Op.SUB, Op.MUL, Op.DIV, Op.POW, Op.SQRT, Op.RECIP, Op.SUM, Op.MEAN),
    *(Op.EINSUM, Op.MATMUL, Op.RESHAPE, Op.SLICE, Op.GATHER, Op.CONCAT, Op.NORMALIZATION),
}
#: Tensors looked at from one start; a boundary written out stream by stream has about 60.
_MAX_REACH = 160


class Reach:
    """The tensors that a tensor is on the way to, nearest first."""

    def __init__(self, start: Value) -> None:
        self.start = start
        self.seen: dict[Value, None] = {start: None}
        self._stopped: set[Value] = set()

    def values(self) -> Iterator[Value]:
        """The tensors, without the start."""
        queue = [self.start]
        for value in queue:
            if value is not self.start:
                yield value
            if value in self._stopped:
                continue
            for node, _ in value.live_consumers():
                if node.op not in _PATH:
                    continue
                for output in node.outputs:
                    if output not in self.seen and len(self.seen) < _MAX_REACH:
                        self.seen[output] = None
                        queue.append(output)

    def stop_at(self, value: Value) -> None:
        """Do not look beyond ``value``."""
        self._stopped.add(value)
