// SPDX-License-Identifier: Apache-2.0
//
// Several copies of this library in one process: the file that a program opens, and the one that TensorRT unpacks from
// an engine built with setPluginsToSerialize. Each has communicators of its own, so plugins and whoever makes
// communicators must use the same one: the first that was loaded. The others give TensorRT its creators instead of
// their own.
#ifndef TRTLLM_MHC_PLUGINS_COMMON_COPIES_H
#define TRTLLM_MHC_PLUGINS_COMMON_COPIES_H

#include <NvInferRuntime.h>
#include <stdint.h>

#include <string>

#include "mhc/mhc.h"

#ifdef __cplusplus
extern "C" {
#endif

// The path of the first copy of this version in the process, by which dlopen(RTLD_NOLOAD) finds it; this one's mostly.
MHC_API char const* mhcFirstCopy(void);
// This copy's own creators, for the other copies.
MHC_API nvinfer1::IPluginCreatorInterface* const* mhcOwnCreators(int32_t* count);

#ifdef __cplusplus
}
#endif

namespace trtllm_mhc {

// The creators that TensorRT gets: the first copy's.
nvinfer1::IPluginCreatorInterface* const* pluginCreators(int32_t& count) noexcept;

// A sentence on copies of other versions, which cannot stand in for this one; empty: there are none.
std::string otherVersions();

}  // namespace trtllm_mhc

#endif  // TRTLLM_MHC_PLUGINS_COMMON_COPIES_H
