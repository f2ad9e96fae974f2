// SPDX-License-Identifier: Apache-2.0
//
// What the plugins export beside TensorRT's own entry points: the text of their errors, and the warm-up mode.
#ifndef TRTLLM_MHC_PLUGINS_COMMON_PLUGIN_API_H
#define TRTLLM_MHC_PLUGINS_COMMON_PLUGIN_API_H

#include <stddef.h>
#include <stdint.h>

#include "mhc/mhc.h"

#ifdef __cplusplus
extern "C" {
#endif

// Takes (returns and forgets) the newest error that a plugin or creator reported on the calling thread; with anyThread
// != 0, and none on this thread, the newest of the process: TensorRT may build on threads of its own. Writes at most
// size-1 bytes and a terminating zero into buffer. Returns the length of the whole text, 0 when there is none.
MHC_API size_t mhcPluginTakeError(char* buffer, size_t size, int32_t anyThread);

// Warm-up mode of the calling thread: while it is on, plugins enqueued by this thread compute with this rank's
// contribution alone and wait for nobody. Returns the former mode. A CUDA graph captured in this mode keeps the local
// kernels.
MHC_API int32_t mhcPluginSetWarmup(int32_t on);

#ifdef __cplusplus
}
#endif
#endif  // TRTLLM_MHC_PLUGINS_COMMON_PLUGIN_API_H
