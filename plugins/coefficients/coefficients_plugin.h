// SPDX-License-Identifier: Apache-2.0
//
// MhcCoefficients: the mixes that a sublayer computes from its entry streams, in one layer. README.md has the tables.
#ifndef TRTLLM_MHC_PLUGINS_COEFFICIENTS_COEFFICIENTS_PLUGIN_H
#define TRTLLM_MHC_PLUGINS_COEFFICIENTS_COEFFICIENTS_PLUGIN_H

#include <memory>

#include "common/plugin_base.h"

namespace trtllm_mhc {

struct CoefficientsAttributes {
    int32_t hcMult;
    float rmsNormEps;
    float hcEps;
    float postAlpha;
    int32_t sinkhornIters;
    int32_t broadcast;  // 1: the first layer, where all streams are equal and one is given

    explicit CoefficientsAttributes(FieldValues const& values);
};

class CoefficientsPlugin final : public PluginBase {
public:
    static constexpr char kName[] = "MhcCoefficients";

    explicit CoefficientsPlugin(CoefficientsAttributes const& attributes);

protected:
    std::unique_ptr<PluginBase> copy() const override;
    void serialize(FieldList& fields) const override;
    size_t workspaceBytes(Extents const& extents) const override;
    void launch(Call const& call) override;

private:
    CoefficientsAttributes attributes_;
};

class CoefficientsCreator final : public CreatorBase {
public:
    CoefficientsCreator();

protected:
    std::unique_ptr<PluginBase> create(FieldValues const& values, nvinfer1::TensorRTPhase phase) const override;
};

}  // namespace trtllm_mhc

#endif  // TRTLLM_MHC_PLUGINS_COEFFICIENTS_COEFFICIENTS_PLUGIN_H
