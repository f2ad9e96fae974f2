// SPDX-License-Identifier: Apache-2.0
//
// Making the plugin creators known to TensorRT, however the library came into the process.
//
//   IPluginRegistry::loadLibrary   TensorRT asks setLoggerFinder and getCreators, and registers the creators itself.
//   dlopen, TensorRT is loaded     The library's constructor registers them in every TensorRT 10 or 11 of the process.
//   dlopen or LD_PRELOAD before    The library puts itself into the global scope, where its own getPluginRegistry,
//   TensorRT is loaded             createInferRuntime_INTERNAL and createInferBuilder_INTERNAL are found before
//   TensorRT's.
//                                  They register and pass the call on.
//
// Whichever happens first, the others do no harm: what the library registered is withdrawn when loadLibrary asks, so
// that TensorRT can register it and give its caller a handle.
//
// Not covered: a host that reaches libnvinfer only through dlsym on its own handle, or opens it with RTLD_DEEPBIND,
// after this library. There, preload both: LD_PRELOAD=/path/libtrtllm_mhc.so:libnvinfer.so.10
#ifndef TRTLLM_MHC_PLUGINS_COMMON_REGISTRATION_H
#define TRTLLM_MHC_PLUGINS_COMMON_REGISTRATION_H

#include <stdint.h>

#include "mhc/mhc.h"

#ifdef __cplusplus
extern "C" {
#endif

// Registers the creators in every TensorRT of the process that lacks them. Returns the number of TensorRTs that still
// lack any afterwards; TensorRT's logger has the reason. 0 when no TensorRT is loaded.
MHC_API int32_t mhcRegisterPlugins(void);

#ifdef __cplusplus
}
#endif
#endif  // TRTLLM_MHC_PLUGINS_COMMON_REGISTRATION_H
