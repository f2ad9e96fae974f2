# SPDX-License-Identifier: Apache-2.0
"""What a stream's work consists of, as the nodes of a captured CUDA graph: a trace without a profiler."""

from __future__ import annotations

from collections.abc import Callable

from cuda.bindings import driver
from cuda.bindings import runtime as cudart

from trtllm_mhc.runtime.cuda import Stream, call


def captured_nodes(stream: Stream, work: Callable[[], None]) -> list[str]:
    """The nodes of what `work` gives to `stream`, in order: a kernel's name, else the node's type.

    Capturing fails where something would wait for the device or allocate on the way.
    """
    call("cudaStreamBeginCapture", stream.handle, cudart.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal)
    try:
        work()
    finally:
        graph = call("cudaStreamEndCapture", stream.handle)
    try:
        _, count = call("cudaGraphGetNodes", graph)
        nodes, _ = call("cudaGraphGetNodes", graph, count)
        return [_describe(node) for node in nodes[:count]]
    finally:
        call("cudaGraphDestroy", graph)


def _describe(node: cudart.cudaGraphNode_t) -> str:
    kind = call("cudaGraphNodeGetType", node)
    if kind != cudart.cudaGraphNodeType.cudaGraphNodeTypeKernel:
        return str(kind.name)
    status, parameters = driver.cuGraphKernelNodeGetParams(driver.CUgraphNode(int(node)))
    assert status == driver.CUresult.CUDA_SUCCESS, status
    if int(parameters.func):
        status, name = driver.cuFuncGetName(parameters.func)
    else:
        status, name = driver.cuKernelGetName(parameters.kern)
    assert status == driver.CUresult.CUDA_SUCCESS, status
    return str(name.decode())
