# SPDX-License-Identifier: Apache-2.0
"""A tritonserver on loopback, for tests and examples: started, watched and cleaned up."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from trtllm_mhc.integrations.triton import repository as repositories

HOST = "127.0.0.1"
ENVIRONMENT = "TRTLLM_MHC_TRITON"
_STUB = "triton_python_backend_stub"
_LOG_TAIL = 4000
# Servers like 2.51 wait that long, in vain, for models whose dead process has been sent requests.
_EXIT_S = 5


class ServerError(RuntimeError):
    """The server did not start, or ended. The message has the end of its log."""


@dataclass(frozen=True)
class Installation:
    """Where a server is.

    Attributes:
        program: the tritonserver.
        backends: its backends.
        stubs: folder with a python-backend stub for each Python version; None where `backends` has the only one.
        libraries: folders that the program needs on LD_LIBRARY_PATH.
    """

    program: Path
    backends: Path
    stubs: Path | None = None
    libraries: tuple[Path, ...] = ()

    @classmethod
    def of_wheel(cls, root: Path) -> Installation:
        """The server in an unpacked nvidia-pytriton wheel (scripts/fetch_triton.sh).

        Raises:
            FileNotFoundError: it is not there.
        """
        server = root / "pytriton" / "tritonserver"
        program = server / "bin" / "tritonserver"
        if not program.is_file():
            raise FileNotFoundError(f"expected an unpacked nvidia-pytriton wheel, got no {program}")
        return cls(program, server / "backends", server / "python_backend_stubs", (root / "nvidia_pytriton.libs",))

    @classmethod
    def find(cls) -> Installation:
        """The one in the folder that TRTLLM_MHC_TRITON names (an unpacked wheel), else the one on PATH (a container's).

        Raises:
            FileNotFoundError: there is none.
        """
        if ENVIRONMENT in os.environ:
            return cls.of_wheel(Path(os.environ[ENVIRONMENT]))
        program = shutil.which("tritonserver")
        if program is None:
            raise FileNotFoundError(
                f"no tritonserver: expected one on PATH, or {ENVIRONMENT} to name the folder that "
                "scripts/fetch_triton.sh has unpacked one into"
            )
        return cls(Path(program), Path(program).resolve().parent.parent / "backends")


class TritonServer:
    """One server process, in a process session of its own, with everything that it starts.

    Attributes:
        http, grpc: "address:port" of each.
        log: path of what the server and its stubs print.
    """

    def __init__(
        self,
        installation: Installation,
        repository: Path,
        *,
        python: Path = Path(sys.executable),
        environment: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
        ready_s: float = 60.0,
    ) -> None:
        """Starts the server and waits until it is ready.

        Args:
            installation: the server.
            repository: its models.
            python: interpreter whose environment python-backend models get.
            environment: variables on top of this process's.
            options: more options of tritonserver.
            ready_s: seconds until it must be ready, models included.

        Raises:
            ServerError: it ended, or was not ready in time.
        """
        self._scratch = Path(tempfile.mkdtemp(prefix="trtllm_mhc_triton_"))
        self._shm_prefix = f"trtllm_mhc_{uuid.uuid4().hex[:12]}_"
        self.log = self._scratch / "server.log"
        ports = _free_ports(2)
        self.http, self.grpc = (f"{HOST}:{port}" for port in ports)
        command = repositories.server_command(
            repository,
            tritonserver=os.fspath(installation.program),
            host=HOST,
            http_port=ports[0],
            grpc_port=ports[1],
            options=[
                f"--backend-directory={self._backends(installation, python)}",
                f"--backend-config=python,shm-region-prefix-name={self._shm_prefix}",
                f"--exit-timeout-secs={_EXIT_S}",
                *options,
            ],
        )
        variables = {**os.environ, **(environment or {})}
        # The backend takes the environment of the first python3 on PATH, and the stub is linked to its library. That
        # folder comes last: it may be the system's, with other versions of what the caller has.
        given = [variables["LD_LIBRARY_PATH"]] if variables.get("LD_LIBRARY_PATH") else []
        folders = [*map(str, installation.libraries), *given, str(library_folder(python))]
        variables["LD_LIBRARY_PATH"] = os.pathsep.join(folders)
        variables["PATH"] = f"{python.parent}{os.pathsep}{variables.get('PATH', '')}"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command, env=variables, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        try:
            self._wait_ready(time.monotonic() + ready_s, ready_s)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Of the server."""
        return self._process.pid

    def stubs(self) -> list[int]:
        """Process ids of the python backend's stubs."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                command = (entry / "cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
                if int(fields[1]) == self.pid and fields[0] != "Z" and Path(command).name == _STUB:
                    found.append(int(entry.name))
        return found

    def log_tail(self) -> str:
        """The end of the log, without the tables that the server prints."""
        with contextlib.suppress(OSError):
            lines = self.log.read_text(errors="replace").splitlines()
            return "\n".join(line for line in lines if line.strip() and line[0] not in "|+")[-_LOG_TAIL:]
        return ""

    def close(self, timeout_s: float = 20.0) -> None:
        """Ends the server and its stubs, by force after `timeout_s`, and removes what they leave."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(timeout_s)
        for leftover in Path("/dev/shm").glob(f"{self._shm_prefix}*"):
            leftover.unlink(missing_ok=True)
        shutil.rmtree(self._scratch, ignore_errors=True)

    def __enter__(self) -> TritonServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _backends(self, installation: Installation, python: Path) -> Path:
        """The installation's backends, with the stub for this Python where there are several."""
        if installation.stubs is None:
            return installation.backends
        folder = self._scratch / "backends"
        for backend in installation.backends.iterdir():
            (folder / backend.name).mkdir(parents=True)
            for file in backend.iterdir():
                (folder / backend.name / file.name).symlink_to(file.resolve())
        version = _ask(python, "import sys; print('%d.%d' % sys.version_info[:2])")
        source = installation.stubs / version / _STUB
        if not source.is_file():
            raise ServerError(f"expected a python-backend stub for Python {version}, got no {source}")
        stub = folder / "python" / _STUB
        stub.unlink(missing_ok=True)
        shutil.copyfile(source, stub)
        stub.chmod(0o755)
        return folder

    def _wait_ready(self, deadline: float, ready_s: float) -> None:
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise ServerError(f"tritonserver ended with {self._process.returncode}:\n{self.log_tail()}")
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(f"http://{self.http}/v2/health/ready", timeout=2.0) as answer,
            ):
                if answer.status == 200:
                    return
            time.sleep(0.05)
        raise ServerError(f"tritonserver was not ready after {ready_s:g} s:\n{self.log_tail()}")


def library_folder(python: Path) -> Path:
    """Where a Python's shared library is; the stub is linked to it.

    Raises:
        ServerError: it is nowhere.
    """
    lines = _ask(
        python,
        "import sys, sysconfig; print('libpython%d.%d.so.1.0' % sys.version_info[:2]); "
        "print(sys.base_prefix); print(sysconfig.get_config_var('LIBDIR')); "
        "print(sysconfig.get_config_var('MULTIARCH') or '')",
    ).splitlines()
    name, prefix, libdir, multiarch = [*lines, "", ""][:4]
    folders = [Path(prefix, "lib"), Path(libdir), Path("/usr/lib", multiarch)]
    for folder in folders:
        if (folder / name).exists():
            return folder
    raise ServerError(
        f"expected {name}, which the python backend's stub needs, in one of {[str(folder) for folder in folders]}"
    )


def _ask(python: Path, code: str) -> str:
    return subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=30, check=True).stdout.strip()


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((HOST, 0))
        return [each.getsockname()[1] for each in sockets]
