// SPDX-License-Identifier: Apache-2.0
//
// Inputs and outputs of a plugin as a table, and the checks of dtypes and shapes against it. The same checks serve the
// network definition (extents may be symbols), the build (extents may be -1) and every enqueue (all extents known).
#ifndef TRTLLM_MHC_PLUGINS_COMMON_TENSORS_H
#define TRTLLM_MHC_PLUGINS_COMMON_TENSORS_H

#include <NvInferRuntime.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace trtllm_mhc {

// What an axis means: equal meanings have equal extents in all tensors of a call.
enum class Axis : int32_t {
    kRows,             // M
    kStreams,          // hc = 4
    kHidden,           // H: 4096, 5120 or 7168, never dynamic
    kTopK,             // K
    kPermutedRows,     // P, rows of gemm2_permuted
    kScaleWords,       // int32 words of the swizzled MXFP8 scales of [M,H]
    kStreamHidden,     // hc*H: all streams of a token
    kCoefficients,     // (2+hc)*hc = 24: pre, post and comb of a token
    kMixes,            // 3: pre, post and comb
    kFeatures,         // K of a linear layer: a multiple of 128 up to 16384, never dynamic
    kWeightBlockRows,  // H/32
    kWeightScaleWords  // K/128: int32 words of four UE8M0 scales
};

struct TensorSpec {
    char const* name;
    nvinfer1::DataType type;
    std::vector<Axis> shape;
};

constexpr int64_t kUnknownExtent = -1;

struct Shape {
    int32_t rank = 0;
    std::array<int64_t, nvinfer1::Dims::MAX_DIMS> extents{};

    Shape() = default;
    explicit Shape(nvinfer1::Dims const& dims);
    explicit Shape(nvinfer1::DimsExprs const& dims);  // an extent that is no constant becomes kUnknownExtent
};

// The extents that a call's tensors agree on.
struct Extents {
    int64_t rows = kUnknownExtent;
    int64_t hidden = kUnknownExtent;
    int64_t permutedRows = kUnknownExtent;
    int64_t features = kUnknownExtent;
};

struct Signature {
    std::vector<TensorSpec> inputs;
    std::vector<TensorSpec> outputs;
    int32_t topK = 0;

    void checkCounts(int32_t inputCount, int32_t outputCount) const;
    void checkInputType(int32_t index, nvinfer1::DataType type) const;
    // Check one tensor against the extents known so far and add what it tells. Throw PluginError.
    void checkInputShape(int32_t index, Shape const& shape, Extents& extents) const;
    void checkOutputShape(int32_t index, Shape const& shape, Extents& extents) const;
    // The most rows that the inputs' optimization profiles all allow. Throws PluginError if they allow none.
    int64_t checkProfiles(nvinfer1::DynamicPluginTensorDesc const* inputs) const;
    // The extents a call must have before it may be launched.
    static void requireKnown(Extents const& extents);
};

// Words (four E8M0 scales each) of the 128x4-swizzled scales of [rows, hidden].
constexpr int64_t kScaleTileRows = 128;
constexpr int64_t kScaleTileColumns = 128;  // elements of the row that one word scales: 4 scales of 32
int64_t scaleWords(int64_t rows, int64_t hidden);

std::string typeName(nvinfer1::DataType type);

}  // namespace trtllm_mhc

#endif  // TRTLLM_MHC_PLUGINS_COMMON_TENSORS_H
