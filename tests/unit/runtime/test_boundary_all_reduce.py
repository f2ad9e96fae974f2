# SPDX-License-Identifier: Apache-2.0
"""What `BoundaryAllReduce` checks and passes on, with a torch and a communicator that only remember."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from trtllm_mhc.runtime import BoundaryAllReduce, empty_quantized_layer_input
from trtllm_mhc.runtime import boundary_all_reduce as module
from trtllm_mhc.runtime.communicator import PublishTarget

H, K, M = 5120, 6, 3
BF16, F32, I32, U8, E4M3 = "torch.bfloat16", "torch.float32", "torch.int32", "torch.uint8", "torch.float8_e4m3fn"
_addresses = itertools.count(0x10000, 0x10000)


class FakeTensor:
    def __init__(
        self, shape: tuple[int, ...], dtype: str = BF16, device: str = "cuda:1", contiguous: bool = True
    ) -> None:
        kind, _, index = device.partition(":")
        self.shape, self.dtype, self._contiguous = shape, dtype, contiguous
        self.device = SimpleNamespace(type=kind, index=int(index) if index else None)
        self._address = next(_addresses)

    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    def is_contiguous(self) -> bool:
        return self._contiguous

    def stride(self) -> tuple[int, ...]:
        return (7,) * len(self.shape)

    def data_ptr(self) -> int:
        return self._address


@pytest.fixture(autouse=True)
def fake_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = ModuleType("torch")
    names = {"bfloat16": BF16, "float32": F32, "int32": I32, "uint8": U8, "float8_e4m3fn": E4M3}
    for name, value in names.items():
        setattr(torch, name, value)

    def empty(shape: Any, *, dtype: str, device: Any) -> FakeTensor:
        return FakeTensor(shape if isinstance(shape, tuple) else (shape,), dtype)

    torch.empty = empty  # type: ignore[attr-defined]
    torch.empty_like = lambda tensor: FakeTensor(tensor.shape, tensor.dtype)  # type: ignore[attr-defined]
    torch.cuda = SimpleNamespace(  # type: ignore[attr-defined]
        current_stream=lambda device: SimpleNamespace(cuda_stream=900 + device)
    )
    monkeypatch.setitem(sys.modules, "torch", torch)


@dataclass
class FakeCommunicator:
    tp: int = 2
    calls: list[tuple[Any, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.info = SimpleNamespace(tp_size=self.tp, rank=1, device=1, hidden_size=H, capacity=64, lanes=4)

    def publish_target(self, lane: int) -> PublishTarget:
        self.calls.append(("publish_target", lane))
        return PublishTarget((1, 2), 30, 20, 10, 99, 5, 1, 64, H, lane)

    def mark_published(self, target: PublishTarget, rows: int, *, stream: int) -> None:
        self.calls.append(("mark_published", target.owner, rows, stream))

    def enqueue(self, args: Any, *, stream: int, lane: int) -> None:
        self.calls.append(("boundary", args, stream, lane))

    def reset(self) -> None:
        self.calls.append(("reset",))


CONFIG = SimpleNamespace(hidden_size=H, hc_mult=4, num_experts_per_tok=K)


@pytest.fixture
def communicator() -> FakeCommunicator:
    return FakeCommunicator()


@pytest.fixture
def all_reduce(communicator: FakeCommunicator) -> BoundaryAllReduce:
    return BoundaryAllReduce(CONFIG, True, communicator=communicator, lane=2)  # type: ignore[arg-type]


def tensors(**changes: Any) -> dict[str, Any]:
    """Positional order is the call's."""
    return {
        "x": FakeTensor((M, H)),
        "residual": FakeTensor((M, 4, H)),
        "post": FakeTensor((M, 4, 1), F32),
        "comb": FakeTensor((M, 4, 4), F32),
        "pre": FakeTensor((M, 4), F32),
        "norm_weight": FakeTensor((H,)),
        "norm_eps": 1e-20,
        **changes,
    }


def moe(**changes: Any) -> dict[str, Any]:
    parts = {
        "gemm2_permuted": FakeTensor((40, H)),
        "expert_weights": FakeTensor((M, K), F32),
        "expanded_idx_to_permuted_idx": FakeTensor((M * K,), I32),
        "shared_output": FakeTensor((M, H)),
    }
    rest = tensors()
    del rest["x"]
    return {**parts, **rest, **changes}


def test_a_boundary_in_the_order_of_its_arguments(
    all_reduce: BoundaryAllReduce, communicator: FakeCommunicator
) -> None:
    given = tensors()
    residual_out, layer_input = all_reduce(*given.values())
    ((name, args, stream, lane),) = communicator.calls
    assert (name, stream, lane) == ("boundary", 901, 2)
    assert (args.rows, args.published, args.top_k) == (M, 0, 0)
    for field_name, of in [("x", "x"), ("residual", "residual"), ("post", "post"), ("comb", "comb"), ("pre", "pre")]:
        assert getattr(args, field_name) == given[of].data_ptr()
    assert args.gamma == given["norm_weight"].data_ptr()
    assert args.norm_eps == pytest.approx(1e-20)
    assert (residual_out.shape, residual_out.data_ptr()) == ((M, 4, H), args.residual_out)
    assert layer_input is not None
    assert (layer_input.shape, layer_input.dtype, layer_input.data_ptr()) == ((M, H), BF16, args.layer_input)


def test_residual_only(all_reduce: BoundaryAllReduce, communicator: FakeCommunicator) -> None:
    assert all_reduce(*tensors(pre=None, norm_weight=None, norm_eps=0.0).values())[1] is None
    args = communicator.calls[0][1]
    assert (args.pre, args.gamma, args.layer_input) == (None, None, None)


def test_finalize(all_reduce: BoundaryAllReduce, communicator: FakeCommunicator) -> None:
    given = moe()
    all_reduce.finalize(*given.values())
    args = communicator.calls[0][1]
    assert (args.x, args.rows, args.top_k, args.permuted_rows) == (None, M, K, 40)
    for name in ("gemm2_permuted", "expert_weights", "expanded_idx_to_permuted_idx", "shared_output", "residual"):
        assert getattr(args, name) == given[name].data_ptr()


def test_mxfp8(all_reduce: BoundaryAllReduce, communicator: FakeCommunicator) -> None:
    out = empty_quantized_layer_input(M, H, "cuda:1")
    assert (out.data.shape, out.data.dtype) == ((M, H), E4M3)
    assert (out.scale.shape, out.scale.dtype) == ((20480,), U8)
    assert (out.orig_dtype, out.orig_shape) == (BF16, (M, H))
    all_reduce(*tensors().values(), (out.data, out.scale))
    args = communicator.calls[0][1]
    assert (args.mxfp8_data, args.mxfp8_scales) == (out.data.data_ptr(), out.scale.data_ptr())


@pytest.mark.parametrize("size", [(0, H), (3, 5121)])
def test_sizes_that_cannot_be_quantised(size: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="multiple of 32"):
        empty_quantized_layer_input(*size, "cuda")


def test_a_published_contribution(all_reduce: BoundaryAllReduce, communicator: FakeCommunicator) -> None:
    assert all_reduce.publish_target() is all_reduce.publish_target()
    given = tensors()
    all_reduce.mark_published(given["x"])
    all_reduce(*given.values())
    all_reduce(*given.values())
    assert communicator.calls[:2] == [("publish_target", 2), ("mark_published", 5, M, 901)]
    assert [(call[1].published, call[1].x is None) for call in communicator.calls[2:]] == [(1, True), (0, False)]


def test_a_publish_that_its_producer_completed(all_reduce: BoundaryAllReduce, communicator: FakeCommunicator) -> None:
    given = tensors()
    all_reduce.mark_published(given["x"], complete=True)
    all_reduce(*given.values())
    ((name, args, _, _),) = communicator.calls
    assert (name, args.published, args.x) == ("boundary", 1, given["x"].data_ptr())


def test_handles_are_known_by_a_mark_and_not_by_address(
    all_reduce: BoundaryAllReduce, communicator: FakeCommunicator
) -> None:
    given = tensors()
    all_reduce.mark_published(given["x"])
    twin = FakeTensor((M, H))
    twin._address = given["x"].data_ptr()
    with pytest.raises(RuntimeError, match="reducing a tensor other than the published one"):
        all_reduce(*tensors(x=twin).values())
    # As in the original, the mistake has dropped the handle; an old mark means nothing later.
    all_reduce(*given.values())
    assert communicator.calls[-1][1].published == 0


def test_order_of_publishing(all_reduce: BoundaryAllReduce, communicator: FakeCommunicator) -> None:
    x = FakeTensor((M, H))
    all_reduce.mark_published(x)
    for call in (lambda: all_reduce.mark_published(x), lambda: all_reduce.finalize(*moe().values())):
        with pytest.raises(RuntimeError, match="a published contribution is still unreduced"):
            call()
    all_reduce.reset()
    assert communicator.calls[-1] == ("reset",)
    all_reduce.mark_published(x)


def test_a_failed_mark_leaves_nothing_pending(all_reduce: BoundaryAllReduce, communicator: FakeCommunicator) -> None:
    def fails(*arguments: Any, **keywords: Any) -> None:
        raise RuntimeError("the lane is in error")

    communicator.mark_published = fails  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="the lane is in error"):
        all_reduce.mark_published(FakeTensor((M, H)))
    all_reduce.finalize(*moe().values())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": FakeTensor((M, 4096))}, r"x: expected \[M, 5120\], got \[3, 4096\]"),
        ({"x": FakeTensor((M, H), F32)}, "x: expected torch.bfloat16, got torch.float32"),
        ({"x": FakeTensor((M, H), device="cpu")}, "x: expected a tensor on cuda:1"),
        ({"x": FakeTensor((M, H), device="cuda:0")}, "x: expected a tensor on cuda:1"),
        ({"x": FakeTensor((0, H))}, "expected M >= 1 rows, got 0"),
        ({"residual": FakeTensor((M + 1, 4, H))}, r"residual: expected \[3, 4, 5120\], got \[4, 4, 5120\]"),
        ({"residual": FakeTensor((M, 4, H), contiguous=False)}, "residual: expected a contiguous tensor, got strides"),
        ({"post": FakeTensor((M, 5), F32)}, r"post: expected 12 elements, got \[3, 5\]"),
        ({"post": FakeTensor((M, 4), BF16)}, "post: expected torch.float32, got torch.bfloat16"),
        ({"comb": FakeTensor((M, 4), F32)}, "comb: expected 48 elements"),
        ({"pre": FakeTensor((M, 3), F32)}, "pre: expected 12 elements"),
        ({"pre": None}, "pre and norm_weight belong together"),
        ({"norm_weight": FakeTensor((H, 1))}, r"norm_weight: expected \[5120\], got \[5120, 1\]"),
        ({"mxfp8_out": (FakeTensor((M, H), BF16), FakeTensor((20480,), U8))}, "mxfp8_out data: expected torch.float8"),
        ({"mxfp8_out": (FakeTensor((M, H), E4M3), FakeTensor((99,), U8))}, "at least 20480 bytes, got 99"),
        (
            {"pre": None, "norm_weight": None, "mxfp8_out": (FakeTensor((M, H), E4M3), FakeTensor((20480,), U8))},
            "no layer input for mxfp8_out",
        ),
    ],
)
def test_wrong_arguments(
    all_reduce: BoundaryAllReduce, communicator: FakeCommunicator, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        all_reduce(*tensors(**changes).values())
    assert communicator.calls == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gemm2_permuted": FakeTensor((40, 512))}, r"gemm2_permuted: expected \[P, 5120\]"),
        ({"expert_weights": FakeTensor((M, K - 1), F32)}, "expert_weights: expected 18 elements"),
        ({"expert_weights": FakeTensor((M, K), BF16)}, "expert_weights: expected torch.float32"),
        ({"expanded_idx_to_permuted_idx": FakeTensor((M, K), "torch.int64")}, "expected torch.int32, got torch.int64"),
        ({"shared_output": FakeTensor((M, H, 1))}, r"shared_output: expected \[M, 5120\]"),
    ],
)
def test_wrong_moe_outputs(
    all_reduce: BoundaryAllReduce, communicator: FakeCommunicator, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        all_reduce.finalize(*moe(**changes).values())
    assert communicator.calls == []


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda c: BoundaryAllReduce(SimpleNamespace(hidden_size=H, hc_mult=2, num_experts_per_tok=K), communicator=c),
         "hc_mult: expected 4, got 2"),
        (lambda c: BoundaryAllReduce(SimpleNamespace(hidden_size=4096, num_experts_per_tok=K), communicator=c),
         "communicator's 5120, got 4096"),
        (lambda c: BoundaryAllReduce(CONFIG, communicator=c, lane=4), "lane: expected 0 to 3, got 4"),
    ],
)  # fmt: skip
def test_wrong_constructions(
    communicator: FakeCommunicator, make: Callable[[FakeCommunicator], object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make(communicator)


def test_what_one_instance_cannot(communicator: FakeCommunicator) -> None:
    plain = BoundaryAllReduce(CONFIG, communicator=communicator)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="mxfp8_out needs quantize_layer_input=True"):
        plain(*tensors().values(), (FakeTensor((M, H), E4M3), FakeTensor((20480,), U8)))
    with pytest.raises(ValueError, match="at most 64 rows, got 65"):
        plain.mark_published(FakeTensor((65, H)))
    alone = BoundaryAllReduce(CONFIG, communicator=FakeCommunicator(tp=1))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="more than one rank"):
        alone.mark_published(FakeTensor((M, H)))


def test_torch_is_not_imported_with_the_module() -> None:
    assert not hasattr(module, "torch")
