// SPDX-License-Identifier: Apache-2.0
#ifndef TRTLLM_MHC_PLUGINS_CREATORS_H
#define TRTLLM_MHC_PLUGINS_CREATORS_H

#include <NvInferRuntime.h>

#include <cstdint>

namespace trtllm_mhc {

// The creators of all plugins of this copy of the library. They live until the process ends: registries keep the
// pointers. common/copies.h says which copy's creators TensorRT gets.
nvinfer1::IPluginCreatorInterface* const* ownCreators(int32_t& count) noexcept;

}  // namespace trtllm_mhc

#endif  // TRTLLM_MHC_PLUGINS_CREATORS_H
