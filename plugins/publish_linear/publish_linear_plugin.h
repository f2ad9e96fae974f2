// SPDX-License-Identifier: Apache-2.0
//
// MhcPublishLinear: a row-parallel linear layer whose output the next MhcBoundary finds in the mailbox. README.md has
// the tables.
#ifndef TRTLLM_MHC_PLUGINS_PUBLISH_LINEAR_PUBLISH_LINEAR_PLUGIN_H
#define TRTLLM_MHC_PLUGINS_PUBLISH_LINEAR_PUBLISH_LINEAR_PLUGIN_H

#include <memory>

#include "common/group_plugin.h"

namespace trtllm_mhc {

class PublishLinearPlugin final : public GroupPlugin {
public:
    static constexpr char kName[] = "MhcPublishLinear";

    PublishLinearPlugin(GroupAttributes group, int32_t weightType, nvinfer1::TensorRTPhase phase);

protected:
    std::unique_ptr<PluginBase> copy() const override;
    void serializeOwn(FieldList& fields) const override;
    void launchLocal(Call const& call) const override;
    void launchGroup(Call const& call, mhcComm_t comm, int32_t lane) const override;

private:
    mhcPublishLinearArgs arguments(Call const& call) const;

    int32_t weightType_;  // mhcWeightType
};

class PublishLinearCreator final : public CreatorBase {
public:
    PublishLinearCreator();

protected:
    std::unique_ptr<PluginBase> create(FieldValues const& values, nvinfer1::TensorRTPhase phase) const override;
};

}  // namespace trtllm_mhc

#endif  // TRTLLM_MHC_PLUGINS_PUBLISH_LINEAR_PUBLISH_LINEAR_PLUGIN_H
