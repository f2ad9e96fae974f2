// SPDX-License-Identifier: Apache-2.0
//
// MhcAllReduce: the all-reduce of the unfused form, with the boundary's own order of summation. README.md has the
// tables.
#ifndef TRTLLM_MHC_PLUGINS_ALL_REDUCE_ALL_REDUCE_PLUGIN_H
#define TRTLLM_MHC_PLUGINS_ALL_REDUCE_ALL_REDUCE_PLUGIN_H

#include <memory>
#include <string>

#include "common/group_plugin.h"

namespace trtllm_mhc {

class AllReducePlugin final : public GroupPlugin {
public:
    static constexpr char kName[] = "MhcAllReduce";

    AllReducePlugin(GroupAttributes group, std::string strategy, nvinfer1::TensorRTPhase phase);

protected:
    std::unique_ptr<PluginBase> copy() const override;
    void serializeOwn(FieldList& fields) const override;
    void launchLocal(Call const& call) const override;
    void launchGroup(Call const& call, mhcComm_t comm, int32_t lane) const override;

private:
    std::string strategy_;
};

class AllReduceCreator final : public CreatorBase {
public:
    AllReduceCreator();

protected:
    std::unique_ptr<PluginBase> create(FieldValues const& values, nvinfer1::TensorRTPhase phase) const override;
};

}  // namespace trtllm_mhc

#endif  // TRTLLM_MHC_PLUGINS_ALL_REDUCE_ALL_REDUCE_PLUGIN_H
