# SPDX-License-Identifier: Apache-2.0
"""`trtllm-mhc doctor --group`: makes a group of ranks and says what it decided, and why.

Under a launcher (torchrun, mpirun, srun, or TRTLLM_MHC_RANK and TRTLLM_MHC_WORLD_SIZE) every process is a rank, and the
first one of each group prints. Otherwise the ranks are threads of this process.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from trtllm_mhc.runtime import cuda
from trtllm_mhc.runtime.communicator import Communicator, CommunicatorInfo, CommunicatorOptions, GroupInfo
from trtllm_mhc.runtime.library import MhcError, Reach, Transport
from trtllm_mhc.runtime.threads import ThreadGroup

EXIT_MADE, EXIT_FAILED, EXIT_MISSING = 0, 1, 3

# In the order in which the library looks at them (docs/ranks.md).
WORLD_VARIABLES = (
    ("TRTLLM_MHC_RANK", "TRTLLM_MHC_WORLD_SIZE"),
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
    ("PMI_RANK", "PMI_SIZE"),
)
REACHES = {
    Reach.NONE: "not at all",
    Reach.SELF: "itself",
    Reach.PEER_ACCESS: "peer access",
    Reach.IPC: "CUDA IPC",
}
TRANSPORTS = {
    Transport.LOCAL: "nothing is carried",
    Transport.MAILBOX: "mailbox",
    Transport.MAILBOX_NCCL: "mailbox, and NCCL for large M",
    Transport.NCCL: "NCCL",
}


@dataclass(frozen=True)
class GroupOptions:
    """What the command line says.

    Attributes:
        tp: ranks; None: all processes of the launch, or two threads.
        hidden_size: H.
        options: of the communicator; what is missing comes from the environment or is the default.
    """

    tp: int | None
    hidden_size: int
    options: CommunicatorOptions


def run(options: GroupOptions, json_path: Path | None, console: Console) -> int:
    """Makes the group, prints or writes the report, and closes the group; returns the exit code."""
    try:
        if cuda.device_count() == 0:
            console.print("[yellow]A group needs a GPU, and no CUDA device is usable here.[/]")
            return EXIT_MISSING
        world = world_of(os.environ)
        record = _threads(options) if world is None else _process(options, *world)
    except (MhcError, cuda.CudaError, ValueError) as error:
        notes = "".join(f"\n  {note}" for note in getattr(error, "__notes__", ()))
        console.print(f"[red]The group was not made:[/] {escape(str(error) + notes)}")
        return EXIT_FAILED
    if record is None:
        return EXIT_MADE
    if json_path is not None and str(json_path) == "-":
        sys.stdout.write(json.dumps(record, indent=2) + "\n")
        return EXIT_MADE
    console.print(table_of(record))
    if json_path is not None:
        json_path.write_text(json.dumps(record, indent=2) + "\n")
    return EXIT_MADE


def world_of(environment: Mapping[str, str]) -> tuple[int, int] | None:
    """This process's rank and the number of processes, or None where no launcher has started it.

    Raises:
        ValueError: the variables are no numbers.
    """
    for rank, size in WORLD_VARIABLES:
        if environment.get(rank) and environment.get(size):
            return int(environment[rank]), int(environment[size])
    return None


def record_of(info: CommunicatorInfo, group: GroupInfo, names: list[str]) -> dict[str, Any]:
    """The report, for JSON.

    Args:
        info: rank 0's.
        group: the group's.
        names: of the devices that this process sees, by ordinal.
    """
    ranks = range(info.tp_size)
    own_process = group.first_in_process[info.rank]
    return {
        "ranks": [
            {
                "rank": rank,
                "device": group.devices[rank],
                # Ordinals are each process's own.
                "device_name": names[group.devices[rank]] if group.first_in_process[rank] == own_process else None,
                "first_in_process": group.first_in_process[rank],
                "first_on_device": group.first_on_device[rank],
                "reaches": [group.reach[rank][peer].name.lower() for peer in ranks],
            }
            for rank in ranks
        ],
        "transport": info.transport.name.lower(),
        "transport_reason": info.transport_reason,
        "nccl": info.nccl_version is not None,
        "nccl_version": info.nccl_version,
        "nccl_rows": info.nccl_rows,
        "multicast": info.multicast,
        "multicast_reason": group.multicast_reason,
        "ranks_per_device": info.ranks_per_device,
        "wait_mode_asked": group.wait_mode,
        "waits_at_gate": info.waits_at_gate,
        "exchange_rows": info.exchange_rows,
        "capacity": info.capacity,
        "lanes": info.lanes,
        "hidden_size": info.hidden_size,
        "timeout_s": group.timeout_s,
        "on_error": group.on_error,
        "mailbox_bytes": info.mailbox_bytes,
        "sentence": group.sentence,
    }


def table_of(record: dict[str, Any]) -> Table:
    """The same, to read."""
    table = Table(title="trtllm-mhc doctor --group", title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for rank in record["ranks"]:
        name = f", {rank['device_name']}" if rank["device_name"] else ""
        ways: dict[str, list[str]] = {}
        for peer, way in enumerate(rank["reaches"]):
            if peer != rank["rank"]:
                ways.setdefault(REACHES[Reach[way.upper()]], []).append(str(peer))
        reaches = "; ".join(f"{way} to {', '.join(peers)}" for way, peers in ways.items())
        shared = f", shared with rank {rank['first_on_device']}" if rank["first_on_device"] != rank["rank"] else ""
        process = "own process" if rank["first_in_process"] == rank["rank"] else f"rank {rank['first_in_process']}'s"
        text = f"device {rank['device']}{name}{shared}; process: {process}; {reaches or 'no peers'}"
        table.add_row(f"rank {rank['rank']}", escape(text))
    nccl = f"{record['nccl_version']}, for M of {record['nccl_rows']} and more" if record["nccl"] else "not used"
    gate = "a one-CTA kernel waits at the gate" if record["waits_at_gate"] else "every CTA waits for itself"
    exchange = record["exchange_rows"]
    together = f"up to M = {exchange}" if exchange else "never"
    rows = {
        "carried by": f"{TRANSPORTS[Transport[record['transport'].upper()]]}: {record['transport_reason']}",
        "NCCL": nccl,
        "NVLink multicast": "used" if record["multicast"] else f"not used: {record['multicast_reason']}",
        "ranks per device": f"at most {record['ranks_per_device']}",
        "waiting": f"{gate} (asked for: {record['wait_mode_asked']})",
        "publish and consume in one kernel": together,
        "capacity": f"{record['capacity']} rows a slot; larger M goes in chunks",
        "lanes": str(record["lanes"]),
        "time-out": f"{record['timeout_s']:g} s",
        "on error": record["on_error"],
        "mailbox": f"{record['mailbox_bytes'] / 2**20:.1f} MiB a rank",
    }
    for subject, text in rows.items():
        table.add_row(subject, escape(str(text)))
    return table


def _report(communicator: Communicator) -> dict[str, Any]:
    names = [cuda.device_info(ordinal).name for ordinal in range(cuda.device_count())]
    return record_of(communicator.info, communicator.group_info(), names)


def _threads(options: GroupOptions) -> dict[str, Any]:
    tp = options.tp or 2
    group = ThreadGroup.on_devices(tp)
    assert group.devices is not None
    devices = group.devices

    def work(rank: int) -> dict[str, Any]:
        with Communicator.threads(
            "doctor",
            tp_size=tp,
            rank=rank,
            device=devices[rank],
            hidden_size=options.hidden_size,
            **options.options,
        ) as communicator:
            return _report(communicator)

    return group.run(work, timeout_s=2 * options.options.get("timeout_s", 60.0))[0]


def _process(options: GroupOptions, rank: int, size: int) -> dict[str, Any] | None:
    """The report on the group's first rank, None on the others."""
    tp = options.tp or size
    first = rank // tp * tp
    given = options.options.copy()
    given["group"] = range(first, first + tp)
    with Communicator.from_environment(tp_size=tp, hidden_size=options.hidden_size, **given) as communicator:
        return _report(communicator) if communicator.info.rank == 0 else None
