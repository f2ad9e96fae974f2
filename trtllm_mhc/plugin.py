# SPDX-License-Identifier: Apache-2.0
"""The plugin library: where it is, loading it, and its creators in the process's TensorRT."""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path
from typing import Any

import trtllm_mhc

NAMESPACE = "trtllm_mhc"
VERSION = "1"
LIBRARY_NAME = "libtrtllm_mhc.so"

_lock = threading.Lock()
_library: ctypes.CDLL | None = None


def library_path() -> Path:
    """Path of the package's plugin library, for trtexec, Triton, Polygraphy and the like.

    Raises:
        FileNotFoundError: the package is used from a source tree in which the library has not been built.
    """
    # An editable installation has two folders, the sources and the installed files. `make build` writes to both, a
    # build by hand to the sources only.
    folders = list(dict.fromkeys([os.path.dirname(trtllm_mhc.__file__), *trtllm_mhc.__path__]))
    for folder in folders:
        path = Path(folder, LIBRARY_NAME)
        if path.is_file():
            return path.resolve()
    raise FileNotFoundError(f"{LIBRARY_NAME} is in none of {folders}; build it with `make build`, or `pip install .`")


def load() -> ctypes.CDLL:
    """Load the plugin library once per process and make its creators known to TensorRT.

    Works before or after `import tensorrt`, and any number of times from any thread. A copy that something else has
    loaded already (LD_PRELOAD, `load_library`, Polygraphy's --plugins) is used as it is, because communicators and
    plugins must live in the same copy.

    Raises:
        FileNotFoundError: see `library_path`.
        OSError: the library cannot be loaded.
        RuntimeError: the copy that is loaded already is of another version than this package, or TensorRT refused the
            creators.
    """
    global _library
    with _lock:
        if _library is None:
            path = _loaded_copy() or library_path()
            library = _first_copy(ctypes.CDLL(os.fspath(path)))
            library.mhcVersion.restype = ctypes.c_char_p
            version = library.mhcVersion().decode()
            if version != trtllm_mhc.__version__:
                raise RuntimeError(
                    f"expected the plugin library in version {trtllm_mhc.__version__}, like this package, "
                    f"got {version} in {path}"
                )
            library.mhcRegisterPlugins.restype = ctypes.c_int
            _library = library
        if _library.mhcRegisterPlugins() != 0:
            raise RuntimeError("TensorRT refused the plugin creators; its log says why")
        return _library


def creator(name: str) -> Any:
    """The creator (`IPluginCreatorV3One`) of plugin `name`, for instance "MhcBoundary".

    Raises:
        ImportError: TensorRT is not installed.
        LookupError: the library has no plugin of that name.
    """
    import tensorrt

    load()
    registry = tensorrt.get_plugin_registry()
    ours = {c.name: c for c in registry.all_creators if (c.plugin_namespace, c.plugin_version) == (NAMESPACE, VERSION)}
    if name not in ours:
        raise LookupError(f"expected one of the plugins {sorted(ours)}, got {name!r}")
    return ours[name]


def _first_copy(library: ctypes.CDLL) -> ctypes.CDLL:
    """The copy whose plugins TensorRT gets: an engine that carries the library may have brought it in before."""
    library.mhcFirstCopy.restype = ctypes.c_char_p
    first = library.mhcFirstCopy().decode()
    # By name: the file may be gone.
    return ctypes.CDLL(first, mode=os.RTLD_NOLOAD | os.RTLD_NOW) if first else library


def _loaded_copy() -> Path | None:
    """The plugin library that this process has mapped already, if any."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            fields = line.rstrip("\n").split(maxsplit=5)
            if len(fields) == 6 and os.path.basename(fields[5]) == LIBRARY_NAME:
                return Path(fields[5])
    return None
