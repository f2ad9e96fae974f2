// SPDX-License-Identifier: Apache-2.0
#include "creators.h"

#include <array>

#include "all_reduce/all_reduce_plugin.h"
#include "boundary/boundary_plugin.h"
#include "coefficients/coefficients_plugin.h"
#include "publish_linear/publish_linear_plugin.h"

namespace trtllm_mhc {

nvinfer1::IPluginCreatorInterface* const* ownCreators(int32_t& count) noexcept {
    // Never destroyed: TensorRT may look at them after our static destructors would have run.
    static std::array<nvinfer1::IPluginCreatorInterface*, 4> const creators{
        new BoundaryCreator, new AllReduceCreator, new CoefficientsCreator, new PublishLinearCreator};
    count = static_cast<int32_t>(creators.size());
    return creators.data();
}

}  // namespace trtllm_mhc
