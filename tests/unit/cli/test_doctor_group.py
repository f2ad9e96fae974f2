# SPDX-License-Identifier: Apache-2.0
"""`doctor --group`: which ranks it makes, and that the report says what the group decided."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from trtllm_mhc.cli import doctor_group
from trtllm_mhc.cli.app import app
from trtllm_mhc.runtime import cuda
from trtllm_mhc.runtime.communicator import CommunicatorInfo, GroupInfo
from trtllm_mhc.runtime.library import MhcError, Reach, Status, Transport

INFO = CommunicatorInfo(
    tp_size=2,
    rank=0,
    device=0,
    hidden_size=5120,
    capacity=64,
    lanes=3,
    ranks_per_device=2,
    waits_at_gate=True,
    exchange_rows=0,
    multicast=False,
    mailbox_bytes=3 << 20,
    transport=Transport.MAILBOX,
    transport_reason="nccl_rows is 0, and all ranks have peer access",
    nccl_rows=0,
    nccl_workspace_rows=0,
    nccl_version=None,
)
GROUP = GroupInfo(
    devices=(0, 0),
    first_in_process=(0, 1),
    first_on_device=(0, 0),
    reach=((Reach.SELF, Reach.IPC), (Reach.IPC, Reach.SELF)),
    timeout_s=2.5,
    on_error="raise",
    wait_mode="auto",
    multicast_reason="ranks share a device",
    sentence="everything in one sentence",
)


def text_of(record: dict[str, Any]) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(doctor_group.table_of(record))
    return capture.get()


def test_the_table_says_what_was_decided_and_why() -> None:
    text = text_of(doctor_group.record_of(INFO, GROUP, ["NVIDIA Test"]))
    for part in (
        "device 0, NVIDIA Test; process: own process; CUDA IPC to 1",
        "device 0, shared with rank 0; process: own process; CUDA IPC to 0",
        "mailbox: nccl_rows is 0, and all ranks have peer access",
        "not used: ranks share a device",
        "at most 2",
        "a one-CTA kernel waits at the gate (asked for: auto)",
        "never",
        "64 rows a slot",
        "2.5 s",
        "3.0 MiB a rank",
    ):
        assert part in text


def test_ranks_with_devices_of_their_own_and_nccl() -> None:
    info = replace(
        INFO,
        ranks_per_device=1,
        waits_at_gate=False,
        exchange_rows=32,
        transport=Transport.MAILBOX_NCCL,
        nccl_rows=512,
        nccl_version="2.28.9",
    )
    reach = ((Reach.SELF, Reach.PEER_ACCESS), (Reach.PEER_ACCESS, Reach.SELF))
    group = replace(GROUP, devices=(0, 1), first_in_process=(0, 0), first_on_device=(0, 1), reach=reach)
    record = doctor_group.record_of(info, group, ["NVIDIA A", "NVIDIA B"])
    assert [rank["device_name"] for rank in record["ranks"]] == ["NVIDIA A", "NVIDIA B"]
    assert record["ranks"][0]["reaches"] == ["self", "peer_access"]
    text = text_of(record)
    assert "device 1, NVIDIA B; process: rank 0's; peer access to 0" in text
    assert "2.28.9, for M of 512 and more" in text
    assert "up to M = 32" in text


@pytest.mark.parametrize(
    ("environment", "world"),
    [
        ({}, None),
        ({"RANK": "1"}, None),
        ({"RANK": "1", "WORLD_SIZE": "4"}, (1, 4)),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, (0, 2)),
        ({"RANK": "1", "WORLD_SIZE": "4", "TRTLLM_MHC_RANK": "0", "TRTLLM_MHC_WORLD_SIZE": "2"}, (0, 2)),
    ],
)
def test_the_launch_is_read_from_the_environment(environment: dict[str, str], world: tuple[int, int] | None) -> None:
    assert doctor_group.world_of(environment) == world


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "device_count", lambda: 1)
    for rank, size in doctor_group.WORLD_VARIABLES:
        monkeypatch.delenv(rank, raising=False)
        monkeypatch.delenv(size, raising=False)


def test_json_goes_to_the_output_alone(one_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    record = doctor_group.record_of(INFO, GROUP, ["NVIDIA Test"])
    seen: list[doctor_group.GroupOptions] = []

    def threads(options: doctor_group.GroupOptions) -> dict[str, Any]:
        seen.append(options)
        return record

    monkeypatch.setattr(doctor_group, "_threads", threads)
    result = CliRunner().invoke(app, ["doctor", "--group", "--tp", "4", "--lanes", "2", "--json", "-"])
    assert result.exit_code == 0
    assert json.loads(result.stdout) == record
    assert seen == [doctor_group.GroupOptions(4, 5120, {"lanes": 2, "nccl_rows": 0})]


def test_under_a_launcher_the_ranks_are_processes(one_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(doctor_group, "_process", lambda options, rank, size: seen.append((rank, size)))
    result = CliRunner().invoke(app, ["doctor", "--group", "--tp", "2"])
    assert (result.exit_code, result.stdout) == (0, "")
    assert seen == [(3, 4)]


def test_a_group_that_cannot_be_made_is_an_error_with_the_reason(
    one_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(options: doctor_group.GroupOptions) -> dict[str, Any]:
        raise MhcError("device 0 cannot access the memory of device 1", Status.UNSUPPORTED)

    monkeypatch.setattr(doctor_group, "_threads", fail)
    result = CliRunner().invoke(app, ["doctor", "--group"])
    assert result.exit_code == 1
    assert "device 0 cannot access the memory of device 1" in result.stdout


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "device_count", lambda: 0)
    result = CliRunner().invoke(app, ["doctor", "--group"])
    assert result.exit_code == 3
    assert "needs a GPU" in result.stdout
