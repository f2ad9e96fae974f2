// SPDX-License-Identifier: Apache-2.0
//
// MhcBoundary: all-reduce, mHC post, and, unless residual-only, delayed collapse and RMSNorm. README.md has the tables.
#ifndef TRTLLM_MHC_PLUGINS_BOUNDARY_BOUNDARY_PLUGIN_H
#define TRTLLM_MHC_PLUGINS_BOUNDARY_BOUNDARY_PLUGIN_H

#include <memory>

#include "common/group_plugin.h"

namespace trtllm_mhc {

struct BoundaryAttributes {
    int32_t hcMult;
    float normEps;
    int32_t collapse;   // 0: residual-only
    int32_t published;  // 1: the producer of x has stored it into the mailbox
    int32_t topK;       // > 0: MoE finalize in place of x
    int32_t quantize;   // 1: the layer input also as MXFP8

    explicit BoundaryAttributes(FieldValues const& values);  // throws PluginError
};

class BoundaryPlugin final : public GroupPlugin {
public:
    static constexpr char kName[] = "MhcBoundary";

    BoundaryPlugin(GroupAttributes group, BoundaryAttributes const& attributes, nvinfer1::TensorRTPhase phase);

protected:
    std::unique_ptr<PluginBase> copy() const override;
    void serializeOwn(FieldList& fields) const override;
    void launchLocal(Call const& call) const override;
    void launchGroup(Call const& call, mhcComm_t comm, int32_t lane) const override;

private:
    mhcBoundaryArgs arguments(Call const& call) const;

    BoundaryAttributes attributes_;
};

class BoundaryCreator final : public CreatorBase {
public:
    BoundaryCreator();

protected:
    std::unique_ptr<PluginBase> create(FieldValues const& values, nvinfer1::TensorRTPhase phase) const override;
};

}  // namespace trtllm_mhc

#endif  // TRTLLM_MHC_PLUGINS_BOUNDARY_BOUNDARY_PLUGIN_H
