# SPDX-License-Identifier: Apache-2.0
"""The fused boundary for programs written in torch.

`BoundaryAllReduce` has the interface of the class of the same name in vLLM's specialised decode of DeepSeek V4.1, so
that its `Boundaries` can hold one of ours. Differences: M beyond the mailbox's capacity goes through in chunks, `reset`
is collective and clears the device's side too, `publish_target` gives a record instead of two addresses, and
`mark_published` enqueues a kernel.

All work is enqueued on torch's current stream, allocates its outputs with torch and may be captured
(`torch.cuda.graph`). torch is imported when it is needed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from trtllm_mhc.runtime import library as c_api
from trtllm_mhc.runtime.communicator import Communicator, PublishTarget

if TYPE_CHECKING:
    import torch

    Tensor: TypeAlias = torch.Tensor

_TOKEN = "_trtllm_mhc_published"


class ModelConfig(Protocol):
    """What is read of a model's configuration (Hugging Face's attribute names).

    Attributes:
        hidden_size: H.
        num_experts_per_tok: experts of a token, K.
    """

    hidden_size: int
    num_experts_per_tok: int


@dataclass(frozen=True)
class QuantizedLayerInput:
    """A layer input as MXFP8.

    Attributes:
        data: [M, H] float8_e4m3fn.
        scale: uint8 E8M0 scales of 32 elements each, swizzled in tiles of 128 rows and 4 columns.
        orig_dtype: torch.bfloat16.
        orig_shape: (M, H).
    """

    data: Tensor
    scale: Tensor
    orig_dtype: torch.dtype
    orig_shape: tuple[int, int]


def empty_quantized_layer_input(num_tokens: int, hidden_size: int, device: torch.device | str) -> QuantizedLayerInput:
    """An unfilled MXFP8 layer input; `(data, scale)` is what `mxfp8_out` takes.

    Raises:
        ValueError: no tokens, or a hidden size that is not a multiple of 32.
    """
    import torch

    if num_tokens < 1 or hidden_size < 1 or hidden_size % 32 != 0:
        raise ValueError(
            f"expected num_tokens >= 1 and a hidden_size that is a multiple of 32, got {num_tokens}, {hidden_size}"
        )
    size = int(c_api.library().mhcMxfp8ScaleBytes(num_tokens, hidden_size))
    return QuantizedLayerInput(
        data=torch.empty((num_tokens, hidden_size), dtype=torch.float8_e4m3fn, device=device),
        scale=torch.empty(size, dtype=torch.uint8, device=device),
        orig_dtype=torch.bfloat16,
        orig_shape=(num_tokens, hidden_size),
    )


class _Published(NamedTuple):
    token: object
    complete: bool


class BoundaryAllReduce:
    """All-reduce, mHC post, delayed collapse and RMSNorm in one pass, for one rank of a tensor-parallel group.

    Tensors are contiguous and on the communicator's device: bf16 activations, float32 mixes. A call that is refused
    has enqueued nothing.

    Attributes:
        tp: number of ranks.
        rank: this rank's index.
        communicator: what it runs over; not closed by this object.
        lane: its mailbox lane.
    """

    def __init__(
        self,
        config: ModelConfig,
        quantize_layer_input: bool = False,
        *,
        communicator: Communicator,
        lane: int = 0,
    ) -> None:
        """Not collective; the communicator has met already. Nothing else may use the lane at the same time.

        Args:
            config: the model's.
            quantize_layer_input: whether calls may ask for `mxfp8_out`.
            communicator: of this rank.
            lane: mailbox lane.

        Raises:
            ValueError: the configuration's hc_mult is not 4, or its hidden size is not the communicator's.
        """
        info = communicator.info
        streams = getattr(config, "hc_mult", c_api.STREAMS)
        if streams != c_api.STREAMS:
            raise ValueError(f"config.hc_mult: expected {c_api.STREAMS}, got {streams}")
        if config.hidden_size != info.hidden_size:
            raise ValueError(
                f"config.hidden_size: expected the communicator's {info.hidden_size}, got {config.hidden_size}"
            )
        if not 0 <= lane < info.lanes:
            raise ValueError(f"lane: expected 0 to {info.lanes - 1}, got {lane}")
        self.communicator = communicator
        self.lane = lane
        self.tp = info.tp_size
        self.rank = info.rank
        self._hidden = info.hidden_size
        self._top_k = config.num_experts_per_tok
        self._quantizes = quantize_layer_input
        self._target: PublishTarget | None = None
        self._published: _Published | None = None

    # ---- publishing ---------------------------------------------------------------------------------------------

    def publish_target(self) -> PublishTarget:
        """Where a producer stores its contribution itself, and how (`PublishTarget`): the same for the whole lifetime.

        Raises:
            InvalidArgumentError: the group has one rank.
        """
        if self._target is None:
            self._target = self.communicator.publish_target(self.lane)
        return self._target

    def mark_published(self, x: Tensor, *, complete: bool = False) -> None:
        """Records that the kernels enqueued so far on the current stream store `x` [M, H] into the mailbox.

        `__call__(x, ...)`, which must come next, then launches only the consumer. `x` is a handle with the right shape,
        known again by a mark on the tensor object, never by its address.

        Args:
            x: the producer's output.
            complete: the producer did the whole publish, as `Communicator.publish(x)` does, and `x` has its values.
                Otherwise it has stored rows through `publish_target`; ticket and headers are enqueued here, and the
                values of `x` are never read.

        Raises:
            RuntimeError: another contribution is still unreduced.
            ValueError: the shape is wrong, or M is beyond the mailbox's capacity.
            MailboxError: the lane is in error.
        """
        if self._published is not None:
            raise RuntimeError("a published contribution is still unreduced")
        if self.tp == 1:
            raise ValueError("publishing needs a group of more than one rank")
        rows = self._rows_of("x", x)
        if not complete:
            target = self.publish_target()
            if rows > target.capacity:
                raise ValueError(f"x: a published contribution has at most {target.capacity} rows, got {rows}")
            self.communicator.mark_published(target, rows, stream=self._stream())
        published = _Published(object(), complete)
        setattr(x, _TOKEN, published.token)
        self._published = published

    def reset(self) -> None:
        """Collective: drops a publish that an aborted step left unreduced, also in the mailboxes, and clears errors.

        All ranks of the communicator call it, with no boundary under way; every lane is cleared.
        """
        self._published = None
        self.communicator.reset()

    # ---- boundaries ---------------------------------------------------------------------------------------------

    def __call__(
        self,
        x: Tensor,
        residual: Tensor,
        post: Tensor,
        comb: Tensor,
        pre: Tensor | None,
        norm_weight: Tensor | None,
        norm_eps: float,
        mxfp8_out: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The boundary of a tensor-parallel partial output.

        Args:
            x: [M, H] bf16, this rank's partial, or what was marked as published.
            residual: [M, 4, H] bf16.
            post: float32, M * 4 elements.
            comb: float32, M * 16 elements, [source, target].
            pre: float32, M * 4 elements; None: residual-only.
            norm_weight: [H] bf16; None together with `pre`.
            norm_eps: of the RMSNorm; not used when residual-only.
            mxfp8_out: (data, scale) of `empty_quantized_layer_input`, filled as well.

        Returns:
            residual_out [M, 4, H] and layer_input [M, H], bf16, newly allocated; no layer_input when residual-only.

        Raises:
            RuntimeError: another tensor is published and unreduced; it is forgotten, and only `reset` makes the lane
                usable again.
            ValueError: a tensor's shape, dtype, layout or device is wrong.
            MailboxError: the lane is in error.
        """
        published, self._published = self._published, None
        if published is not None and getattr(x, _TOKEN, None) is not published.token:
            raise RuntimeError("reducing a tensor other than the published one")
        rows = self._rows_of("x", x)
        args = self._common(rows, residual, post, comb, pre, norm_weight, norm_eps)
        if published is not None:
            args.published = 1
        if published is None or published.complete:
            args.x = self._pointer("x", x)
        return self._enqueue(args, residual, pre, mxfp8_out)

    def finalize(
        self,
        gemm2_permuted: Tensor,
        expert_weights: Tensor,
        expanded_idx_to_permuted_idx: Tensor,
        shared_output: Tensor,
        residual: Tensor,
        post: Tensor,
        comb: Tensor,
        pre: Tensor | None,
        norm_weight: Tensor | None,
        norm_eps: float,
        mxfp8_out: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The boundary of a MoE output that is left unfinalized.

        Args:
            gemm2_permuted: [P, H] bf16, the experts' rows.
            expert_weights: float32, M * K elements.
            expanded_idx_to_permuted_idx: int32, M * K elements; -1: the expert is not on this rank.
            shared_output: [M, H] bf16.
            residual: and the rest as in `__call__`.
            post: likewise.
            comb: likewise.
            pre: likewise.
            norm_weight: likewise.
            norm_eps: likewise.
            mxfp8_out: likewise.

        Raises:
            RuntimeError: a published contribution is unreduced.
            ValueError: as in `__call__`.
            MailboxError: likewise.
        """
        if self._published is not None:
            raise RuntimeError("a published contribution is still unreduced")
        rows = self._rows_of("shared_output", shared_output)
        args = self._common(rows, residual, post, comb, pre, norm_weight, norm_eps)
        experts = tuple(gemm2_permuted.shape)
        if len(experts) != 2 or experts[1] != self._hidden:
            raise ValueError(f"gemm2_permuted: expected [P, {self._hidden}], got {list(experts)}")
        import torch

        args.top_k = self._top_k
        args.permuted_rows = experts[0]
        args.gemm2_permuted = self._pointer("gemm2_permuted", gemm2_permuted)
        args.shared_output = self._pointer("shared_output", shared_output)
        count = rows * self._top_k
        args.expert_weights = self._elements("expert_weights", expert_weights, count)
        args.expanded_idx_to_permuted_idx = self._elements(
            "expanded_idx_to_permuted_idx", expanded_idx_to_permuted_idx, count, torch.int32
        )
        return self._enqueue(args, residual, pre, mxfp8_out)

    # ---- checks and the call ------------------------------------------------------------------------------------

    def _common(
        self,
        rows: int,
        residual: Tensor,
        post: Tensor,
        comb: Tensor,
        pre: Tensor | None,
        norm_weight: Tensor | None,
        norm_eps: float,
    ) -> c_api.CBoundaryArgs:
        if rows < 1:
            raise ValueError(f"expected M >= 1 rows, got {rows}")
        if (pre is None) != (norm_weight is None):
            raise ValueError("pre and norm_weight belong together: give both, or neither for a residual-only boundary")
        _expect_shape("residual", residual, (rows, c_api.STREAMS, self._hidden))
        args = c_api.CBoundaryArgs(struct_size=ctypes.sizeof(c_api.CBoundaryArgs), rows=rows)
        args.residual = self._pointer("residual", residual)
        args.post = self._elements("post", post, rows * c_api.STREAMS)
        args.comb = self._elements("comb", comb, rows * c_api.STREAMS**2)
        if pre is not None and norm_weight is not None:
            _expect_shape("norm_weight", norm_weight, (self._hidden,))
            args.pre = self._elements("pre", pre, rows * c_api.STREAMS)
            args.gamma = self._pointer("norm_weight", norm_weight)
            args.norm_eps = norm_eps
        return args

    def _enqueue(
        self,
        args: c_api.CBoundaryArgs,
        residual: Tensor,
        pre: Tensor | None,
        mxfp8_out: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, Tensor | None]:
        import torch

        if mxfp8_out is not None:
            if not self._quantizes:
                raise ValueError("mxfp8_out needs quantize_layer_input=True")
            if pre is None:
                raise ValueError("a residual-only boundary has no layer input for mxfp8_out")
            data, scale = mxfp8_out
            _expect_shape("mxfp8_out data", data, (args.rows, self._hidden))
            args.mxfp8_data = self._pointer("mxfp8_out data", data, torch.float8_e4m3fn)
            needed = int(c_api.library().mhcMxfp8ScaleBytes(args.rows, self._hidden))
            if scale.numel() < needed:
                raise ValueError(f"mxfp8_out scale: expected at least {needed} bytes, got {scale.numel()}")
            args.mxfp8_scales = self._pointer("mxfp8_out scale", scale, torch.uint8)
        residual_out = torch.empty_like(residual)
        args.residual_out = residual_out.data_ptr()
        layer_input = None
        if pre is not None:
            layer_input = torch.empty((args.rows, self._hidden), dtype=torch.bfloat16, device=residual.device)
            args.layer_input = layer_input.data_ptr()
        self.communicator.enqueue(args, stream=self._stream(), lane=self.lane)
        return residual_out, layer_input

    def _rows_of(self, name: str, tensor: Tensor) -> int:
        shape = tuple(tensor.shape)
        if len(shape) != 2 or shape[1] != self._hidden:
            raise ValueError(f"{name}: expected [M, {self._hidden}], got {list(shape)}")
        return int(shape[0])

    def _elements(self, name: str, tensor: Tensor, count: int, dtype: torch.dtype | None = None) -> int:
        import torch

        if tensor.numel() != count:
            raise ValueError(f"{name}: expected {count} elements, got {list(tensor.shape)}")
        return self._pointer(name, tensor, dtype or torch.float32)

    def _pointer(self, name: str, tensor: Tensor, dtype: torch.dtype | None = None) -> int:
        """The tensor's address, once its dtype (bf16 by default), device and layout are right."""
        import torch

        expected = dtype or torch.bfloat16
        if tensor.dtype != expected:
            raise ValueError(f"{name}: expected {expected}, got {tensor.dtype}")
        device = self.communicator.info.device
        if tensor.device.type != "cuda" or tensor.device.index != device:
            raise ValueError(f"{name}: expected a tensor on cuda:{device}, got one on {tensor.device}")
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: expected a contiguous tensor, got strides {list(tensor.stride())}")
        return int(tensor.data_ptr())

    def _stream(self) -> int:
        import torch

        return int(torch.cuda.current_stream(self.communicator.info.device).cuda_stream)


def _expect_shape(name: str, tensor: Tensor, shape: Sequence[int]) -> None:
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{name}: expected {list(shape)}, got {list(tensor.shape)}")
