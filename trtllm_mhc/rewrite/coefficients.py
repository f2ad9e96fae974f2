# SPDX-License-Identifier: Apache-2.0
"""The pattern of a sublayer's mixes: projection of the streams, sigmoids, softmax and Sinkhorn rounds.

The chain is found from its softmax. What an element of the logits is, is followed back through scales, offsets and
moves to the projection; what becomes of the softmax is followed forward through the rounds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import tensorrt as trt

from trtllm_mhc.network import plugins
from trtllm_mhc.rewrite.expand import Factor, is_widening, names_of
from trtllm_mhc.rewrite.graph import Array, Graph, Node, Op, Value, scalar_constant
from trtllm_mhc.rewrite.indexing import Index, broadcast, is_element, rows, source
from trtllm_mhc.rewrite.norm import mean_square_under
from trtllm_mhc.rewrite.report import CoefficientsEntry, Reason

_MAX_HC = 8
_MAX_DIVISIONS = 2000


@dataclass(frozen=True)
class CoefficientsMatch:
    """The mixes of a sublayer.

    Attributes:
        streams: [..., hc, H] or, with equal streams, [..., H], bfloat16.
        fn: the constant of the projection.
        fn_transposed: whether that is stored [features, coefficients].
        scale: for pre, post and comb.
        base: an offset for each coefficient, in the order pre, post, comb.
        post, comb, pre: the results.
    """

    streams: Value
    fn: Value
    fn_transposed: bool
    scale: Array
    base: Array
    rms_norm_eps: float
    hc_eps: float
    post_alpha: float
    sinkhorn_iters: int
    post: Value
    comb: Value
    pre: Value

    @property
    def hc(self) -> int:
        """Number of streams."""
        return self.comb.shape[-1]

    @property
    def is_broadcast(self) -> bool:
        """Whether all streams are equal and given once."""
        return self.features == self.streams.shape[-1]

    @property
    def features(self) -> int:
        """Columns of the projection."""
        return self.fn.shape[0] if self.fn_transposed else self.fn.shape[1]

    @property
    def depth(self) -> int:
        """Of the deepest result."""
        return self.comb.producer.depth if self.comb.producer is not None else 0

    def reasons(self) -> list[Reason]:
        """Why the plugin cannot compute them."""
        hidden = self.features // (1 if self.is_broadcast else self.hc)
        if self.hc == plugins.HC_MULT and hidden in plugins.HIDDEN_SIZES:
            return []
        return [
            Reason(
                "coefficients_size",
                f"The mixes {self.comb.name!r} are of {self.hc} streams of {hidden}.",
                f"The plugin has {plugins.HC_MULT} streams of one of {list(plugins.HIDDEN_SIZES)}.",
            )
        ]

    def entry(self, name: str) -> CoefficientsEntry:
        """What the report says."""
        reasons = tuple(self.reasons())
        return CoefficientsEntry(name, "refused" if reasons else "fused", self.streams.name, self.comb.name, reasons)


@dataclass(frozen=True)
class _Affine:
    """``scale * element + offset``."""

    value: Value
    index: Index
    scale: float
    offset: float


def find_coefficients(graph: Graph) -> list[CoefficientsMatch]:
    """The mixes that outputs depend on, by depth."""
    sigmoids: dict[Value, list[tuple[Node, list[_Affine]]]] = {}
    softmaxes: list[Node] = []
    for node in graph.nodes:
        if node.live and node.op is Op.SOFTMAX:
            softmaxes.append(node)
        elif node.live and node.op is Op.SIGMOID and len(node.output.shape) > 1:
            elements = _elements(node.operands[0], 1)
            if elements:
                sigmoids.setdefault(elements[0].value, []).append((node, elements))
    found = [match for node in softmaxes if (match := _match(node, sigmoids)) is not None]
    return sorted(found, key=lambda match: match.depth)


def _match(softmax: Node, sigmoids: dict[Value, list[tuple[Node, list[_Affine]]]]) -> CoefficientsMatch | None:
    logits = softmax.operands[0]
    hc = logits.shape[-1] if logits.shape else 0
    if len(logits.shape) < 3 or logits.shape[-2] != hc or softmax.reduced_axes != (len(logits.shape) - 1,):
        return None
    elements = _elements(logits, 2)
    mixes = elements[0].value if elements else None
    if mixes is None or mixes.shape[-1] != hc * (hc + 2) or not _are(elements, mixes, 2 * hc):
        return None
    of_pre = next((each for each in sigmoids.get(mixes, []) if _are(each[1], mixes, 0)), None)
    of_post = next((each for each in sigmoids.get(mixes, []) if _are(each[1], mixes, hc)), None)
    if of_pre is None or of_post is None or not len(of_pre[1]) == len(of_post[1]) == hc:
        return None
    pre, post = _shifted(of_pre[0].output, Op.ADD), _shifted(of_post[0].output, Op.MUL)
    rounds = _sinkhorn(softmax.output)
    projection = _projection(mixes)
    parts = [of_pre[1], of_post[1], elements]
    if pre is None or post is None or rounds is None or projection is None or pre[1] != rounds[1]:
        return None
    if any(each.scale != part[0].scale for part in parts for each in part):
        return None
    streams, fn, transposed, eps = projection
    features = fn.shape[0] if transposed else fn.shape[1]
    if features not in (streams.shape[-1], hc * streams.shape[-1]):
        return None
    if features != streams.shape[-1] and streams.shape[-2] != hc:
        return None
    return CoefficientsMatch(
        streams,
        fn,
        transposed,
        scale=np.array([part[0].scale for part in parts], np.float32),
        base=np.array([each.offset for part in parts for each in part], np.float32),
        rms_norm_eps=eps,
        hc_eps=rounds[1],
        post_alpha=post[1],
        sinkhorn_iters=rounds[2],
        post=post[0],
        comb=rounds[0],
        pre=pre[0],
    )


def _elements(value: Value, behind: int) -> list[_Affine]:
    """The elements of a token of ``value``, of which ``behind`` axes are, in order; empty if there are too many."""
    sizes = value.shape[len(value.shape) - behind :]
    if any(not 0 < size <= _MAX_HC for size in sizes):
        return []
    tokens = rows(value.shape[: len(value.shape) - behind])
    return [_affine(value, (*tokens, *at)) for at in np.ndindex(*sizes)]


def _are(elements: list[_Affine], mixes: Value, first: int) -> bool:
    """Whether the elements are those of ``mixes`` from ``first`` on."""
    return all(
        each.value is mixes and is_element(mixes, each.index, first + number) for number, each in enumerate(elements)
    )


def _affine(value: Value, index: Index) -> _Affine:
    """An element, followed back through scales and offsets by constants, and moves."""
    scale, offset = 1.0, 0.0
    while True:
        node, moved = value.producer, source(value, index)
        if moved is not None:
            value, index = moved
            continue
        constant = None if node is None or node.op not in (Op.ADD, Op.MUL) else _by_constant(node, index)
        if node is None or constant is None:
            return _Affine(value, index, scale, offset)
        number, value, index = constant
        if node.op is Op.MUL:
            scale *= number
        elif scale != 1.0 or offset != 0.0:
            # Scaled after the offset, or offset twice: not the plugin's roundings.
            return _Affine(node.output, index, scale, offset)
        else:
            offset = number


def _by_constant(node: Node, index: Index) -> tuple[float, Value, Index] | None:
    """The constant of a sum or product with one, and the other operand's element."""
    for a, b in (node.operands, node.operands[::-1]):
        at, other = broadcast(a, index), broadcast(b, index)
        if a.constant is None or at is None or other is None:
            continue
        numbers = tuple(axis for axis in at if isinstance(axis, int))
        if len(numbers) == len(at):
            return float(a.constant[numbers]), b, other
    return None


def _shifted(value: Value, op: Op) -> tuple[Value, float] | None:
    """The sum or product of ``value`` and a scalar constant that is its only reader."""
    readers = list(value.live_consumers())
    if len(readers) != 1 or readers[0][0].op is not op or value.is_output or value.is_debug:
        return None
    node, slot = readers[0]
    number = scalar_constant(node.operands[1 - slot])
    return None if number is None else (node.output, number)


def _sinkhorn(softmax: Value) -> tuple[Value, float, int] | None:
    """The end of the rounds that begin at a softmax, their epsilon, and how many divisions by columns there are."""
    shifted = _shifted(softmax, Op.ADD)
    if shifted is None:
        return None
    matrix, eps = shifted
    rank, divisions = len(matrix.shape), 0
    while divisions < _MAX_DIVISIONS:
        axis = rank - 2 if divisions % 2 == 0 else rank - 1
        divided = _divided(matrix, axis, eps)
        if divided is None:
            break
        matrix, divisions = divided, divisions + 1
    return (matrix, eps, (divisions + 1) // 2) if divisions % 2 else None


def _divided(matrix: Value, axis: int, eps: float) -> Value | None:
    """``matrix / (its sum over axis + eps)``, if nothing else is made of ``matrix``."""
    if matrix.is_output or matrix.is_debug:
        return None
    readers = [node for node, _ in matrix.live_consumers()]
    sums = [node for node in readers if node.op is Op.SUM and node.reduced_axes == (axis,) and node.keeps_axes]
    quotients = [node for node in readers if node.op is Op.DIV]
    if len(readers) != 2 or len(sums) != 1 or len(quotients) != 1:
        return None
    shifted = _shifted(sums[0].output, Op.ADD)
    if shifted is None or shifted[1] != eps or quotients[0].operands != (matrix, shifted[0]):
        return None
    return quotients[0].output


def _projection(mixes: Value) -> tuple[Value, Value, bool, float] | None:
    """``(streams @ fn^T) / sqrt(mean(streams^2) + eps)``: streams, fn, whether it is stored transposed, and eps."""
    node = mixes.producer
    if node is None or node.op is not Op.MUL:
        return None
    for product, inverse in (node.operands, node.operands[::-1]):
        matmul = product.producer
        if matmul is None or matmul.op is not Op.MATMUL or len(inverse.shape) != len(mixes.shape):
            continue
        x, fn = matmul.operands
        of_x, of_fn = matmul.matrix_operations
        made = fn.producer
        if of_x != "NONE" or of_fn == "VECTOR" or len(fn.shape) != 2 or made is None or made.op is not Op.CONSTANT:
            return None
        features = fn.shape[1] if of_fn == "TRANSPOSE" else fn.shape[0]
        index: Index = (*rows(inverse.shape[:-1]), 0)
        found = mean_square_under(Factor(names_of(inverse, index)), features) if inverse.shape[-1] == 1 else None
        streams = _flattened(x)
        if found is None or streams is None or _flattened(found[0]) is not streams or found[1] is None:
            return None
        return streams, fn, of_fn == "NONE", found[1]
    return None


def _flattened(value: Value) -> Value | None:
    """The bfloat16 tensor of whose elements, in their order, a float32 one consists."""
    while (node := value.producer) is not None:
        moves = node.op is Op.IDENTITY or (
            node.op is Op.RESHAPE and all(order == tuple(sorted(order)) for order in node.transposes)
        )
        if not moves and not (node.op is Op.CAST and is_widening(node)):
            break
        value = node.operands[0]
        if value.dtype == trt.bfloat16 and node.op is Op.CAST:
            break
    return value if value.dtype == trt.bfloat16 else None
