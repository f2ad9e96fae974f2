# SPDX-License-Identifier: Apache-2.0
"""What the communicator checks before it calls the library."""

from __future__ import annotations

import ctypes

import pytest

from trtllm_mhc.runtime import communicator as module
from trtllm_mhc.runtime import library as c_api


def config(**changes: object) -> c_api.CCommConfig:
    arguments: dict[str, object] = {
        "tp_size": 4,
        "rank": 2,
        "device": 1,
        "hidden_size": 5120,
        "capacity": 32,
        "lanes": 3,
        "on_error": "trap",
        "wait_mode": "gate",
        "timeout_s": 1.5,
        "group": (0, 2, 4, 6),
    }
    return module._config(**{**arguments, **changes})  # type: ignore[arg-type]


def test_config_is_filled_field_by_field() -> None:
    result = config()
    assert result.struct_size == ctypes.sizeof(c_api.CCommConfig)
    assert (result.tp_size, result.rank, result.device, result.hidden_size) == (4, 2, 1, 5120)
    assert (result.capacity, result.lanes, result.timeout_ms) == (32, 3, 1500)
    assert (result.on_error, result.wait_mode) == (1, 2)
    assert [result.group[index] for index in range(result.group_size)] == [0, 2, 4, 6]
    assert config(group=()).group_size == 0
    assert (result.nccl_rows, result.nccl_workspace_rows) == (0, 0)
    result = config(nccl_rows=128, nccl_workspace_rows=512)
    assert (result.nccl_rows, result.nccl_workspace_rows) == (128, 512)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"on_error": "ignore"}, "on_error: expected 'raise' or 'trap', got 'ignore'"),
        ({"wait_mode": "sleep"}, "wait_mode: expected"),
        ({"timeout_s": 0}, "timeout_s: expected"),
    ],
)
def test_bad_words_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**changes)


def gather(bridge: module._AllGatherBridge, data: bytes, tp_size: int) -> tuple[int, bytes]:
    send = ctypes.create_string_buffer(data, len(data))
    receive = ctypes.create_string_buffer(len(data) * tp_size)
    code = bridge.function(None, ctypes.addressof(send), ctypes.addressof(receive), len(data))
    return code, receive.raw


def test_all_gather_callback_moves_bytes_in_rank_order() -> None:
    bridge = module._AllGatherBridge(lambda part: [b"\0\1\2", part], 2)
    assert gather(bridge, b"abc", 2) == (0, b"\0\1\2abc")


@pytest.mark.parametrize("parts", [[b"abc"], [b"abc", b"ab"]])
def test_wrong_parts_become_the_cause(parts: list[bytes]) -> None:
    bridge = module._AllGatherBridge(lambda part: parts, 2)
    assert gather(bridge, b"abc", 2)[0] != 0

    class Failing:
        def check(self, status: int, what: str, comm: object, lane: int) -> None:
            raise c_api.PeerFailedError(what, c_api.Status.PEER_FAILED)

    with pytest.raises(c_api.PeerFailedError) as caught:
        bridge.check(Failing(), 7, "creating")  # type: ignore[arg-type]
    assert "must return 2 parts of 3 bytes" in str(caught.value.__cause__)


class RecordingLibrary:
    """A library in which every call succeeds."""

    def __init__(self) -> None:
        self.marked: list[tuple[object, ...]] = []

    def check(self, status: int, what: str, comm: object = None, lane: int = -1) -> None:
        assert status == 0

    def mhcCommGetInfo(self, comm: object, info: object) -> int:  # noqa: N802
        return 0

    def mhcCommPublishTarget(self, comm: object, lane: int, argument: object) -> int:  # noqa: N802
        target: c_api.CPublishTarget = argument._obj  # type: ignore[attr-defined]
        assert target.struct_size == ctypes.sizeof(c_api.CPublishTarget)
        target.tp_size, target.rank, target.hidden_size, target.capacity, target.owner = 2, 1, 4096, 64, 9
        target.slots[0], target.slots[1] = 0x100, 0x200
        target.generation_stride, target.rank_stride, target.row_stride, target.state = 300, 200, 100, 0x300
        return 0

    def mhcMarkPublished(self, *arguments: object) -> int:  # noqa: N802
        self.marked.append(arguments[1:])
        return 0


def test_publish_target_says_where_a_producer_stores() -> None:
    lib = RecordingLibrary()
    communicator = module.Communicator(lib, ctypes.c_void_p(1))  # type: ignore[arg-type]
    target = communicator.publish_target(lane=3)
    assert target == module.PublishTarget(
        slots=(0x100, 0x200),
        generation_stride=300,
        rank_stride=200,
        row_stride=100,
        state=0x300,
        owner=9,
        rank=1,
        capacity=64,
        hidden_size=4096,
        lane=3,
    )
    communicator.mark_published(target, 7, stream=11)
    assert lib.marked == [(3, 9, 7, 11)]
