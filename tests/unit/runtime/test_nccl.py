# SPDX-License-Identifier: Apache-2.0
"""Finding NCCL in a Python environment."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from trtllm_mhc.runtime import library as c_api
from trtllm_mhc.runtime import nccl


def test_the_library_of_the_pypi_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "nvidia" / "nccl" / "lib"
    folder.mkdir(parents=True)
    package = ModuleType("nvidia")
    package.__path__ = [str(tmp_path / "nvidia")]
    monkeypatch.setitem(sys.modules, "nvidia", package)
    assert nccl.wheel_library() is None
    (folder / "libnccl.so.2").touch()
    assert nccl.wheel_library() == folder / "libnccl.so.2"
    monkeypatch.setitem(sys.modules, "nvidia", None)
    assert nccl.wheel_library() is None


@pytest.mark.parametrize("given", [True, False])
def test_the_communicator_of_a_process_group(monkeypatch: pytest.MonkeyPatch, given: bool) -> None:
    handles = [0, 0x1234]
    devices = []

    class Group:
        def _get_backend(self, device: object) -> SimpleNamespace:
            devices.append(device)
            return SimpleNamespace(_comm_ptr=lambda: handles.pop(0))

    distributed = ModuleType("torch.distributed")
    distributed.distributed_c10d = SimpleNamespace(_get_default_group=Group)  # type: ignore[attr-defined]
    torch = ModuleType("torch")
    torch.distributed = distributed  # type: ignore[attr-defined]
    torch.device = lambda kind, index: (kind, index)  # type: ignore[attr-defined]
    torch.cuda = SimpleNamespace(current_device=lambda: 3)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch.distributed", distributed)
    group = Group() if given else None
    with pytest.raises(ValueError, match="has no NCCL communicator yet"):
        nccl.torch_communicator(group)
    assert nccl.torch_communicator(group) == 0x1234
    assert devices == [("cuda", 3)] * 2


def test_the_record_of_a_failure() -> None:
    record = c_api.CErrorRecord(kind=6, rank=-1, token=-1, field=1, got=6)
    found = c_api.MailboxRecord.from_c(record)
    assert found.kind is c_api.ErrorKind.NCCL
    assert found.field is c_api.NcclFailure.REPORTED
    assert str(found) == "an all-reduce through NCCL did not come to its end: NCCL reported an error (6)"
