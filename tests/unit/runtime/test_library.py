# SPDX-License-Identifier: Apache-2.0
"""The ctypes structures against the header itself, and the translation of statuses."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from trtllm_mhc.runtime import library as c_api

HEADER = Path(__file__).parents[3] / "cpp" / "include" / "mhc" / "mhc.h"
STRUCTS: dict[str, type[ctypes.Structure]] = {
    "mhcErrorRecord": c_api.CErrorRecord,
    "mhcCommConfig": c_api.CCommConfig,
    "mhcCommInfo": c_api.CCommInfo,
    "mhcGroupInfo": c_api.CGroupInfo,
    "mhcBoundaryArgs": c_api.CBoundaryArgs,
    "mhcPublishTarget": c_api.CPublishTarget,
    "mhcCoefficientsArgs": c_api.CCoefficientsArgs,
}
ENUMS = {
    "mhcStatus": (c_api.Status, "MHC_"),
    "mhcErrorKind": (c_api.ErrorKind, "MHC_ERROR_"),
    "mhcOnError": (c_api.OnError, "MHC_ON_ERROR_"),
    "mhcWaitMode": (c_api.WaitMode, "MHC_WAIT_"),
    "mhcTransport": (c_api.Transport, "MHC_TRANSPORT_"),
    "mhcReach": (c_api.Reach, "MHC_REACH_"),
}


def test_structures_have_the_header_s_layout(tmp_path: Path) -> None:
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    lines = []
    for name, structure in STRUCTS.items():
        lines.append(f'std::printf("{name} %zu\\n", sizeof({name}));')
        for field in structure._fields_:
            lines.append(f'std::printf("{name}.{field[0]} %zu\\n", offsetof({name}, {field[0]}));')
    source = tmp_path / "layout.cpp"
    source.write_text(f'#include "{HEADER}"\n#include <cstdio>\nint main() {{\n' + "\n".join(lines) + "\n}\n")
    subprocess.run([compiler, "-std=c++17", str(source), "-o", str(tmp_path / "layout")], check=True)
    output = subprocess.run([tmp_path / "layout"], check=True, capture_output=True, text=True).stdout

    expected = {}
    for name, structure in STRUCTS.items():
        expected[name] = ctypes.sizeof(structure)
        for field in structure._fields_:
            expected[f"{name}.{field[0]}"] = getattr(structure, field[0]).offset
    assert {line.split()[0]: int(line.split()[1]) for line in output.splitlines()} == expected


@pytest.mark.parametrize("name", ENUMS)
def test_enumerations_have_the_header_s_values(name: str) -> None:
    enum, prefix = ENUMS[name]
    body = re.search(rf"typedef enum {name} \{{(.*?)\}}", HEADER.read_text(), re.DOTALL)
    assert body is not None
    code = re.sub(r"//.*", "", body.group(1))
    found = {key: int(value) for key, value in re.findall(rf"{prefix}(\w+)\s*=\s*(\d+)", code)}
    assert found == {member.name: member.value for member in enum}


def test_every_function_of_the_header_is_bound_or_for_plugins_only() -> None:
    declared = set(re.findall(r"\b(mhc[A-Z]\w+)\(", re.sub(r"//.*", "", HEADER.read_text())))
    for_plugins = {"mhcCommFind", "mhcCommFindEnvironment", "mhcCommRetain", "mhcCommRelease"}
    assert declared == set(c_api._PROTOTYPES) | for_plugins


class FakeFunction:
    def __init__(self, result: object) -> None:
        self.result = result

    def __call__(self, *arguments: object) -> object:
        return self.result


class FakeCdll:
    """Stands for the loaded library: every function answers a fixed value."""

    _name = "fake.so"

    def __init__(self, **results: object) -> None:
        for name in c_api._PROTOTYPES:
            setattr(self, name, FakeFunction(results.get(name, 0)))


@pytest.mark.parametrize(
    ("status", "exception"),
    [
        (c_api.Status.INVALID_ARGUMENT, c_api.InvalidArgumentError),
        (c_api.Status.CUDA_ERROR, c_api.CudaCallError),
        (c_api.Status.TIMEOUT, c_api.CollectiveTimeoutError),
        (c_api.Status.MAILBOX_ERROR, c_api.MailboxError),
        (c_api.Status.NOT_BOUND, c_api.NotBoundError),
        (c_api.Status.UNSUPPORTED, c_api.UnsupportedError),
        (c_api.Status.PEER_FAILED, c_api.PeerFailedError),
        (c_api.Status.CAPTURE_NOT_READY, c_api.CaptureNotReadyError),
    ],
)
def test_every_status_has_its_exception(status: c_api.Status, exception: type[c_api.MhcError]) -> None:
    lib = c_api.Library(FakeCdll(mhcLastError=b"the sentence"))  # type: ignore[arg-type]
    with pytest.raises(exception, match="what was tried: the sentence") as caught:
        lib.check(status, "what was tried")
    assert caught.value.status is status
    lib.check(c_api.Status.SUCCESS, "fine")


def test_missing_function_names_the_library() -> None:
    cdll = FakeCdll()
    del cdll.mhcBoundary
    with pytest.raises(ImportError, match=r"fake\.so has no function mhcBoundary"):
        c_api.Library(cdll)  # type: ignore[arg-type]


def test_mailbox_error_carries_the_record() -> None:
    cdll = FakeCdll(mhcLastError=b"lane 0 is in error")

    def status(comm: object, lane: int, record: object) -> int:
        target = record._obj  # type: ignore[attr-defined]
        target.kind, target.rank, target.token, target.generation, target.sequence = 2, 3, 5, 1, 77
        target.expected, target.got, target.field = 8, 16, 1
        return c_api.Status.MAILBOX_ERROR

    cdll.mhcCommStatus = status  # type: ignore[attr-defined]
    lib = c_api.Library.__new__(c_api.Library)
    for name in c_api._PROTOTYPES:
        setattr(lib, name, getattr(cdll, name))
    with pytest.raises(c_api.MailboxError, match="rank 3 came with rows 16, this rank has 8") as caught:
        lib.check(c_api.Status.MAILBOX_ERROR, "boundary", ctypes.c_void_p(1), 0)
    record = caught.value.record
    assert record == c_api.MailboxRecord(
        c_api.ErrorKind.HEADER_MISMATCH, 3, 5, 1, 77, expected=8, got=16, field=c_api.HeaderField.ROWS
    )


def test_records_read_as_sentences() -> None:
    common = {"rank": 1, "token": 4, "generation": 2, "sequence": 9, "field": c_api.HeaderField.SEQUENCE}
    timeout = c_api.MailboxRecord(kind=c_api.ErrorKind.TIMEOUT, expected=0, got=0, **common)  # type: ignore[arg-type]
    assert str(timeout) == "time-out: nothing from rank 1 for token 4 (generation 2, call 9)"
    index = c_api.MailboxRecord(kind=c_api.ErrorKind.INDEX, expected=10, got=2**32 - 2, **common)  # type: ignore[arg-type]
    assert "index -2 of token 4 lies outside a tensor of 10 rows" in str(index)
