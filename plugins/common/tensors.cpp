// SPDX-License-Identifier: Apache-2.0
#include "common/tensors.h"

#include <algorithm>
#include <limits>

#include "common/errors.h"
#include "mhc/mhc.h"

namespace trtllm_mhc {
namespace {

using nvinfer1::DataType;

constexpr std::array<int64_t, 3> kHiddenSizes{4096, 5120, 7168};
constexpr char kHiddenSizesText[] = "4096, 5120 or 7168";
constexpr int64_t kCoefficientCount = (2 + MHC_STREAMS) * MHC_STREAMS;
constexpr int64_t kMixCount = 3;
constexpr int64_t kFeatureStep = 128;
constexpr int64_t kMaxFeatures = 16384;
constexpr int64_t kWeightBlock = 32;
constexpr int64_t kMaxRows = std::numeric_limits<int32_t>::max();

std::string tensorName(char const* kind, size_t index, TensorSpec const& spec) {
    return std::string(kind) + " " + std::to_string(index) + " (" + spec.name + ")";
}

std::string extentText(char const* symbol, int64_t extent) {
    return extent == kUnknownExtent ? symbol : std::string(symbol) + "=" + std::to_string(extent);
}

std::string axisText(Axis axis, Extents const& extents, int32_t topK) {
    switch (axis) {
        case Axis::kRows:
            return extentText("M", extents.rows);
        case Axis::kStreams:
            return extentText("hc", MHC_STREAMS);
        case Axis::kHidden:
            return extentText("H", extents.hidden);
        case Axis::kTopK:
            return extentText("K", topK);
        case Axis::kPermutedRows:
            return extentText("P", extents.permutedRows);
        case Axis::kScaleWords:
            return "128*ceil(M/128)*ceil(H/128)";
        case Axis::kStreamHidden:
            return extents.hidden == kUnknownExtent ? "hc*H" : extentText("hc*H", MHC_STREAMS * extents.hidden);
        case Axis::kCoefficients:
            return std::to_string(kCoefficientCount);
        case Axis::kMixes:
            return std::to_string(kMixCount);
        case Axis::kFeatures:
            return extents.features == kUnknownExtent ? "K (a multiple of 128 up to 16384)"
                                                      : extentText("K", extents.features);
        case Axis::kWeightBlockRows:
            return extents.hidden == kUnknownExtent ? "H/32" : extentText("H/32", extents.hidden / kWeightBlock);
        case Axis::kWeightScaleWords:
            return extents.features == kUnknownExtent ? "K/128" : extentText("K/128", extents.features / kFeatureStep);
    }
    return "?";
}

std::string shapeText(TensorSpec const& spec, Extents const& extents, int32_t topK) {
    std::string text;
    for (Axis const axis : spec.shape) {
        text += (text.empty() ? "" : ", ") + axisText(axis, extents, topK);
    }
    return "[" + text + "]";
}

std::string shapeText(Shape const& shape) {
    std::string text;
    int32_t const shownRank = std::clamp<int32_t>(shape.rank, 0, nvinfer1::Dims::MAX_DIMS);
    for (int32_t i = 0; i < shownRank; ++i) {
        text += (text.empty() ? "" : ", ") + std::to_string(shape.extents[static_cast<size_t>(i)]);
    }
    return "[" + text + "]";
}

// Takes over a fresh extent, or says whether it agrees with the one known.
bool agree(int64_t& known, int64_t extent) {
    if (known == kUnknownExtent) {
        known = extent;
    }
    return extent == kUnknownExtent || extent == known;
}

bool matches(Axis axis, int64_t extent, Extents& extents, int32_t topK) {
    bool const known = extent != kUnknownExtent;
    switch (axis) {
        case Axis::kRows:
            return agree(extents.rows, extent);
        case Axis::kStreams:
            return extent == MHC_STREAMS;
        case Axis::kHidden:
            return agree(extents.hidden, extent);
        case Axis::kTopK:
            return extent == topK;
        case Axis::kPermutedRows:
            return agree(extents.permutedRows, extent);
        case Axis::kScaleWords:
            return !known || extents.rows == kUnknownExtent || extent == scaleWords(extents.rows, extents.hidden);
        case Axis::kStreamHidden:
            return extent == MHC_STREAMS * extents.hidden;
        case Axis::kCoefficients:
            return extent == kCoefficientCount;
        case Axis::kMixes:
            return extent == kMixCount;
        case Axis::kFeatures:
            return extent > 0 && extent <= kMaxFeatures && extent % kFeatureStep == 0 &&
                   agree(extents.features, extent);
        case Axis::kWeightBlockRows:
            return extent == extents.hidden / kWeightBlock;
        case Axis::kWeightScaleWords:
            return extent == extents.features / kFeatureStep;
    }
    return false;
}

void checkShape(std::string const& tensor, TensorSpec const& spec, Shape const& shape, Extents& extents, int32_t topK) {
    Extents found = extents;
    bool ok = shape.rank == static_cast<int32_t>(spec.shape.size());
    for (size_t i = 0; ok && i < spec.shape.size(); ++i) {
        ok = matches(spec.shape[i], shape.extents[i], found, topK);
    }
    if (!ok) {
        throw PluginError(tensor + ": expected shape " + shapeText(spec, extents, topK) + ", got " + shapeText(shape));
    }
    bool const hasHidden = std::find(spec.shape.begin(), spec.shape.end(), Axis::kHidden) != spec.shape.end();
    bool const compiled = std::find(kHiddenSizes.begin(), kHiddenSizes.end(), found.hidden) != kHiddenSizes.end();
    if (hasHidden && !compiled) {
        throw PluginError(
            tensor + ": expected a static hidden size H of " + kHiddenSizesText + " in " +
            shapeText(spec, extents, topK) + ", got " + shapeText(shape));
    }
    extents = found;
}

}  // namespace

Shape::Shape(nvinfer1::Dims const& dims) : rank(dims.nbDims) {
    for (int32_t i = 0; i < std::min<int32_t>(rank, nvinfer1::Dims::MAX_DIMS); ++i) {
        extents[static_cast<size_t>(i)] = dims.d[i];
    }
}

Shape::Shape(nvinfer1::DimsExprs const& dims) : rank(dims.nbDims) {
    for (int32_t i = 0; i < std::min<int32_t>(rank, nvinfer1::Dims::MAX_DIMS); ++i) {
        extents[static_cast<size_t>(i)] = dims.d[i]->isConstant() ? dims.d[i]->getConstantValue() : kUnknownExtent;
    }
}

void Signature::checkCounts(int32_t inputCount, int32_t outputCount) const {
    auto const expect = [](char const* kind, std::vector<TensorSpec> const& specs, int32_t count) {
        if (count == static_cast<int32_t>(specs.size())) {
            return;
        }
        std::string names;
        for (TensorSpec const& spec : specs) {
            names += (names.empty() ? "" : ", ") + std::string(spec.name);
        }
        throw PluginError(
            "expected " + std::to_string(specs.size()) + " " + kind + " (" + names + "), got " + std::to_string(count));
    };
    expect("inputs", inputs, inputCount);
    expect("outputs", outputs, outputCount);
}

void Signature::checkInputType(int32_t index, DataType type) const {
    TensorSpec const& spec = inputs.at(static_cast<size_t>(index));
    if (type != spec.type) {
        throw PluginError(
            tensorName("input", static_cast<size_t>(index), spec) + ": expected dtype " + typeName(spec.type) +
            ", got " + typeName(type));
    }
}

void Signature::checkInputShape(int32_t index, Shape const& shape, Extents& extents) const {
    TensorSpec const& spec = inputs.at(static_cast<size_t>(index));
    checkShape(tensorName("input", static_cast<size_t>(index), spec), spec, shape, extents, topK);
}

void Signature::checkOutputShape(int32_t index, Shape const& shape, Extents& extents) const {
    TensorSpec const& spec = outputs.at(static_cast<size_t>(index));
    checkShape(tensorName("output", static_cast<size_t>(index), spec), spec, shape, extents, topK);
}

int64_t Signature::checkProfiles(nvinfer1::DynamicPluginTensorDesc const* descs) const {
    int64_t low = 0;
    int64_t high = kMaxRows;
    for (size_t i = 0; i < inputs.size(); ++i) {
        if (inputs[i].shape.front() != Axis::kRows || descs[i].min.nbDims < 1 || descs[i].max.nbDims < 1) {
            continue;
        }
        int64_t const own[] = {descs[i].min.d[0], descs[i].max.d[0]};
        if (own[0] < 0 || own[1] < 0) {
            continue;
        }
        if (own[0] > high || own[1] < low) {
            throw PluginError(
                tensorName("input", i, inputs[i]) + ": expected a profile that allows some M from " +
                std::to_string(low) + " to " + std::to_string(high) + ", as the inputs before it, got " +
                std::to_string(own[0]) + " to " + std::to_string(own[1]));
        }
        low = std::max(low, own[0]);
        high = std::min(high, own[1]);
    }
    return high;
}

void Signature::requireKnown(Extents const& extents) {
    if (extents.rows < 0 || extents.rows > kMaxRows || extents.permutedRows > kMaxRows) {
        throw PluginError(
            "expected 0 to 2147483647 rows, got M=" + std::to_string(extents.rows) +
            ", P=" + std::to_string(extents.permutedRows));
    }
}

int64_t scaleWords(int64_t rows, int64_t hidden) {
    auto const ceilDiv = [](int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; };
    return kScaleTileRows * ceilDiv(rows, kScaleTileRows) * ceilDiv(hidden, kScaleTileColumns);
}

std::string typeName(DataType type) {
    switch (type) {
        case DataType::kFLOAT:
            return "FLOAT";
        case DataType::kHALF:
            return "HALF";
        case DataType::kINT8:
            return "INT8";
        case DataType::kINT32:
            return "INT32";
        case DataType::kBOOL:
            return "BOOL";
        case DataType::kUINT8:
            return "UINT8";
        case DataType::kFP8:
            return "FP8";
        case DataType::kBF16:
            return "BF16";
        case DataType::kINT64:
            return "INT64";
        case DataType::kINT4:
            return "INT4";
        case DataType::kFP4:
            return "FP4";
        default:
            return "dtype " + std::to_string(static_cast<int32_t>(type));
    }
}

}  // namespace trtllm_mhc
