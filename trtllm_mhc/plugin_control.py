# SPDX-License-Identifier: Apache-2.0
"""What the plugins say and how they behave, beside TensorRT's own interfaces: their errors, and the warm-up mode."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

from trtllm_mhc import plugin

_TEXT_BYTES = 1024


class PluginError(RuntimeError):
    """A plugin, or its creator, refused; the text names what was expected and what came."""


def take_error(*, any_thread: bool = False) -> str | None:
    """Take the newest error that a plugin reported on this thread, or None; it is given out once.

    TensorRT itself only says that something failed, so call this after a failed ``create_plugin``, ``add_plugin_v3``,
    build, deserialization or ``execute_async_v3``.

    Args:
        any_thread: when this thread has none, take the newest of the process: a build may use threads of its own.
    """
    library = plugin.load()
    library.mhcPluginTakeError.restype = ctypes.c_size_t
    library.mhcPluginTakeError.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int32]
    text = ctypes.create_string_buffer(_TEXT_BYTES)
    if library.mhcPluginTakeError(text, _TEXT_BYTES, int(any_thread)) == 0:
        return None
    return text.value.decode(errors="replace")


@contextmanager
def warmup() -> Iterator[None]:
    """Close the gate on purpose: plugins enqueued by this thread compute with this rank's contribution alone.

    They wait for no peer and need no communicator, so that one rank can load its kernels, or be profiled, by itself.
    Their results are not the group's. A CUDA graph captured inside keeps the local kernels for ever: capture outside.
    """
    library = plugin.load()
    library.mhcPluginSetWarmup.restype = ctypes.c_int32
    library.mhcPluginSetWarmup.argtypes = [ctypes.c_int32]
    former = library.mhcPluginSetWarmup(1)
    try:
        yield
    finally:
        library.mhcPluginSetWarmup(former)
