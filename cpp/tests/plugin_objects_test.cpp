// SPDX-License-Identifier: Apache-2.0
//
// Plugin objects without TensorRT: what they serialize, what they check at every enqueue, and when they may
// communicate.
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "common/plugin_api.h"
#include "common/plugin_base.h"
#include "creators.h"

namespace trtllm_mhc {
namespace {

using nvinfer1::DataType;
using nvinfer1::IPluginCreatorV3One;
using nvinfer1::IPluginV3OneBuild;
using nvinfer1::IPluginV3OneRuntime;
using nvinfer1::PluginCapabilityType;
using nvinfer1::PluginField;
using nvinfer1::PluginFieldCollection;
using nvinfer1::PluginFieldType;
using nvinfer1::PluginTensorDesc;
using nvinfer1::TensorRTPhase;

int32_t const kOne = 1;
int32_t const kTwo = 2;
int32_t const kSix = 6;
float const kEps = 1e-20F;

PluginField integer(char const* name, int32_t const& value) {
    return {name, &value, PluginFieldType::kINT32, 1};
}

std::vector<PluginField> plainFields() {
    return {integer("tp_size", kTwo), {"norm_eps", &kEps, PluginFieldType::kFLOAT32, 1}};
}

IPluginCreatorV3One& creator(char const* name) {
    int32_t count = 0;
    auto* const* creators = ownCreators(count);
    for (int32_t i = 0; i < count; ++i) {
        auto* const each = static_cast<IPluginCreatorV3One*>(creators[i]);
        if (std::strcmp(each->getPluginName(), name) == 0) {
            return *each;
        }
    }
    throw std::out_of_range(name);
}

std::unique_ptr<nvinfer1::IPluginV3> create(
    char const* name, std::vector<PluginField> const& fields, TensorRTPhase phase = TensorRTPhase::kRUNTIME) {
    PluginFieldCollection const collection{static_cast<int32_t>(fields.size()), fields.data()};
    return std::unique_ptr<nvinfer1::IPluginV3>(creator(name).createPlugin(name, &collection, phase));
}

IPluginV3OneRuntime& runtime(nvinfer1::IPluginV3& plugin) {
    return *static_cast<IPluginV3OneRuntime*>(plugin.getCapabilityInterface(PluginCapabilityType::kRUNTIME));
}

IPluginV3OneBuild& build(nvinfer1::IPluginV3& plugin) {
    return *static_cast<IPluginV3OneBuild*>(plugin.getCapabilityInterface(PluginCapabilityType::kBUILD));
}

std::vector<PluginField> coefficientsFields() {
    static float const kAlpha = 2.0F;
    return {
        {"rms_norm_eps", &kEps, PluginFieldType::kFLOAT32, 1},
        {"hc_eps", &kEps, PluginFieldType::kFLOAT32, 1},
        {"post_alpha", &kAlpha, PluginFieldType::kFLOAT32, 1},
        integer("sinkhorn_iters", kTwo)};
}

std::string takeError() {
    std::array<char, 1024> text{};
    mhcPluginTakeError(text.data(), text.size(), 0);
    return text.data();
}

PluginTensorDesc desc(DataType type, std::vector<int64_t> const& shape) {
    PluginTensorDesc result{};
    result.type = type;
    result.format = nvinfer1::TensorFormat::kLINEAR;
    result.dims.nbDims = static_cast<int32_t>(shape.size());
    std::copy(shape.begin(), shape.end(), result.dims.d);
    return result;
}

struct Tensors {
    std::vector<PluginTensorDesc> in;
    std::vector<PluginTensorDesc> out;

    int32_t shapeChange(nvinfer1::IPluginV3& plugin) const {
        return runtime(plugin).onShapeChange(
            in.data(), static_cast<int32_t>(in.size()), out.data(), static_cast<int32_t>(out.size()));
    }
    int32_t enqueue(nvinfer1::IPluginV3& plugin) const {
        std::array<void*, 8> const addresses{};
        return runtime(plugin).enqueue(in.data(), out.data(), addresses.data(), addresses.data(), nullptr, nullptr);
    }
};

Tensors plainTensors(int64_t rows, int64_t hidden = 5120) {
    return {
        {desc(DataType::kBF16, {rows, hidden}), desc(DataType::kBF16, {rows, 4, hidden}),
         desc(DataType::kFLOAT, {rows, 4}), desc(DataType::kFLOAT, {rows, 4, 4}), desc(DataType::kFLOAT, {rows, 4}),
         desc(DataType::kBF16, {hidden})},
        {desc(DataType::kBF16, {rows, 4, hidden}), desc(DataType::kBF16, {rows, hidden})}};
}

Tensors coefficientsTensors(int64_t rows, int64_t hidden, bool broadcast) {
    PluginTensorDesc const streams =
        broadcast ? desc(DataType::kBF16, {rows, hidden}) : desc(DataType::kBF16, {rows, 4, hidden});
    return {
        {streams, desc(DataType::kFLOAT, {24, broadcast ? hidden : 4 * hidden}), desc(DataType::kFLOAT, {3}),
         desc(DataType::kFLOAT, {24})},
        {desc(DataType::kFLOAT, {rows, 4}), desc(DataType::kFLOAT, {rows, 4, 4}), desc(DataType::kFLOAT, {rows, 4})}};
}

Tensors publishLinearTensors(int64_t rows, int64_t features, bool scaled) {
    Tensors tensors{
        {desc(DataType::kBF16, {rows, features}), desc(scaled ? DataType::kFP8 : DataType::kBF16, {5120, features})},
        {desc(DataType::kBF16, {rows, 5120})}};
    if (scaled)
        tensors.in.push_back(desc(DataType::kINT32, {160, features / 128}));
    return tensors;
}

// Every field with its bytes.
std::vector<std::pair<std::string, std::string>> serialized(nvinfer1::IPluginV3& plugin) {
    PluginFieldCollection const* const fields = runtime(plugin).getFieldsToSerialize();
    std::vector<std::pair<std::string, std::string>> result;
    for (int32_t i = 0; i < fields->nbFields; ++i) {
        PluginField const& field = fields->fields[i];
        size_t const size = field.type == PluginFieldType::kCHAR ? 1 : 4;
        result.emplace_back(
            field.name, std::string(static_cast<char const*>(field.data), size * static_cast<size_t>(field.length)));
    }
    return result;
}

bool has(std::vector<std::pair<std::string, std::string>> const& fields, char const* name) {
    for (auto const& field : fields) {
        if (field.first == name) {
            return true;
        }
    }
    return false;
}

TEST(Plugins, KeepTheirAttributesThroughSerializationAndClones) {
    std::vector<int32_t> const group{5, 3};
    std::vector<PluginField> fields = plainFields();
    fields.push_back({"group", group.data(), PluginFieldType::kINT32, 2});
    fields.push_back(integer("rank", kOne));
    fields.push_back(integer("quantize", kOne));
    fields.push_back(integer("top_k", kSix));
    auto const first = create("MhcBoundary", fields, TensorRTPhase::kBUILD);
    ASSERT_NE(first, nullptr);
    std::unique_ptr<nvinfer1::IPluginV3> const copy(first->clone());
    EXPECT_EQ(serialized(*first), serialized(*copy));

    PluginFieldCollection const* const written = runtime(*copy).getFieldsToSerialize();
    std::unique_ptr<nvinfer1::IPluginV3> const second(
        creator("MhcBoundary").createPlugin("MhcBoundary", written, TensorRTPhase::kRUNTIME));
    ASSERT_NE(second, nullptr);
    EXPECT_EQ(serialized(*first), serialized(*second));
    EXPECT_TRUE(has(serialized(*second), "rank"));
    EXPECT_EQ(build(*second).getNbOutputs(), 4);
}

TEST(Plugins, SerializeNothingOfARankUnlessItWasGiven) {
    for (char const* const name : {"MhcBoundary", "MhcAllReduce"}) {
        std::vector<PluginField> const fields =
            std::strcmp(name, "MhcBoundary") == 0 ? plainFields() : std::vector<PluginField>{integer("tp_size", kTwo)};
        auto const written = serialized(*create(name, fields));
        EXPECT_TRUE(has(written, "format")) << name;
        EXPECT_FALSE(has(written, "rank")) << name;
        EXPECT_FALSE(has(written, "group")) << name;
    }
}

TEST(Plugins, ShareATimingCacheEntryAmongRanks) {
    std::vector<PluginField> fields = plainFields();
    auto const any = create("MhcBoundary", fields, TensorRTPhase::kBUILD);
    fields.push_back(integer("rank", kOne));
    auto const ranked = create("MhcBoundary", fields, TensorRTPhase::kBUILD);
    EXPECT_STREQ(build(*any).getTimingCacheID(), build(*ranked).getTimingCacheID());
    fields.push_back(integer("quantize", kOne));
    auto const other = create("MhcBoundary", fields, TensorRTPhase::kBUILD);
    EXPECT_STRNE(build(*any).getTimingCacheID(), build(*other).getTimingCacheID());
}

TEST(Plugins, RefuseCombinationsThatMeanNothing) {
    int32_t const zero = 0;
    EXPECT_EQ(create("MhcBoundary", {integer("tp_size", kTwo)}), nullptr);
    EXPECT_NE(takeError().find("\"norm_eps\" is required"), std::string::npos);
    EXPECT_EQ(
        create("MhcBoundary", {integer("tp_size", kTwo), integer("collapse", zero), integer("quantize", kOne)}),
        nullptr);
    EXPECT_NE(takeError().find("\"quantize\": expected 0 with collapse=0"), std::string::npos);
    std::vector<PluginField> fields = plainFields();
    fields.push_back(integer("published", kOne));
    EXPECT_NE(create("MhcBoundary", fields), nullptr);
    fields.push_back(integer("top_k", kSix));
    EXPECT_EQ(create("MhcBoundary", fields), nullptr);
    EXPECT_NE(takeError().find("\"published\": expected 0 with top_k > 0"), std::string::npos);
    EXPECT_EQ(create("MhcAllReduce", {integer("tp_size", kTwo), integer("rank", kTwo)}), nullptr);
    EXPECT_NE(takeError().find("\"rank\": expected -1 to tp_size-1 = 1, got 2"), std::string::npos);
    std::array<int32_t, 2> const twice{4, 4};
    EXPECT_EQ(
        create("MhcAllReduce", {integer("tp_size", kTwo), {"group", twice.data(), PluginFieldType::kINT32, 2}}),
        nullptr);
    EXPECT_NE(takeError().find("distinct world ranks, got [4, 4]"), std::string::npos);
    EXPECT_EQ(creator("MhcBoundary").createPlugin(nullptr, nullptr, TensorRTPhase::kRUNTIME), nullptr);
    EXPECT_EQ(takeError(), "MhcBoundary: expected a field collection, got a null pointer");
    EXPECT_EQ(takeError(), "");
}

TEST(Plugins, CheckShapesAndTypesOfEveryCall) {
    auto const plugin = create("MhcBoundary", plainFields());
    EXPECT_EQ(plainTensors(0).shapeChange(*plugin), 0);
    EXPECT_EQ(plainTensors(1000, 7168).shapeChange(*plugin), 0);

    EXPECT_NE(plainTensors(6, 5000).shapeChange(*plugin), 0);
    EXPECT_EQ(
        takeError(),
        "MhcBoundary: input 0 (x): expected a static hidden size H of 4096, 5120 or 7168 in [M, H], got [6, 5000]");
    Tensors tensors = plainTensors(6);
    tensors.in[1].dims.d[0] = 7;
    EXPECT_NE(tensors.shapeChange(*plugin), 0);
    EXPECT_EQ(takeError(), "MhcBoundary: input 1 (residual): expected shape [M=6, hc=4, H=5120], got [7, 4, 5120]");
    EXPECT_NE(tensors.enqueue(*plugin), 0);
    EXPECT_NE(takeError().find("input 1 (residual)"), std::string::npos);
    tensors = plainTensors(6);
    tensors.in[3].type = DataType::kBF16;
    EXPECT_NE(tensors.shapeChange(*plugin), 0);
    EXPECT_EQ(takeError(), "MhcBoundary: input 3 (comb): expected dtype FLOAT, got BF16");
    tensors = plainTensors(6);
    tensors.out[1].dims.nbDims = 1;
    EXPECT_NE(tensors.shapeChange(*plugin), 0);
    EXPECT_EQ(takeError(), "MhcBoundary: output 1 (layer_input): expected shape [M=6, H=5120], got [6]");
    tensors = plainTensors(int64_t{1} << 31);
    EXPECT_NE(tensors.shapeChange(*plugin), 0);
    EXPECT_NE(takeError().find("got M=2147483648"), std::string::npos);
    tensors.in.pop_back();
    EXPECT_NE(tensors.shapeChange(*plugin), 0);
    EXPECT_EQ(takeError(), "MhcBoundary: expected 6 inputs (x, residual, post, comb, pre, gamma), got 5");
}

TEST(Plugins, KnowTheSizeOfTheQuantizedScales) {
    EXPECT_EQ(scaleWords(0, 5120), 0);
    for (int32_t const hidden : {4096, 5120, 7168}) {
        for (int32_t const rows : {1, 127, 128, 129, 1000}) {
            EXPECT_EQ(static_cast<size_t>(scaleWords(rows, hidden)) * 4, mhcMxfp8ScaleBytes(rows, hidden))
                << rows << " " << hidden;
        }
    }
}

TEST(Coefficients, CheckShapesAndTypesOfEveryCall) {
    auto const plugin = create("MhcCoefficients", coefficientsFields());
    for (int64_t const hidden : {4096, 5120, 7168}) {
        EXPECT_EQ(coefficientsTensors(6, hidden, false).shapeChange(*plugin), 0) << takeError();
    }
    EXPECT_NE(coefficientsTensors(6, 5120, true).shapeChange(*plugin), 0);
    EXPECT_EQ(takeError(), "MhcCoefficients: input 0 (streams): expected shape [M, hc=4, H], got [6, 5120]");
    Tensors tensors = coefficientsTensors(6, 5120, false);
    tensors.in[1].dims.d[1] = 5120;
    EXPECT_NE(tensors.shapeChange(*plugin), 0);
    EXPECT_EQ(takeError(), "MhcCoefficients: input 1 (fn): expected shape [24, hc*H=20480], got [24, 5120]");
    tensors = coefficientsTensors(6, 5120, false);
    tensors.in[2].type = DataType::kBF16;
    EXPECT_NE(tensors.enqueue(*plugin), 0);
    EXPECT_EQ(takeError(), "MhcCoefficients: input 2 (scale): expected dtype FLOAT, got BF16");
    tensors = coefficientsTensors(6, 5120, false);
    tensors.in[3].dims.d[0] = 25;
    EXPECT_NE(tensors.shapeChange(*plugin), 0);
    EXPECT_EQ(takeError(), "MhcCoefficients: input 3 (base): expected shape [24], got [25]");
    tensors = coefficientsTensors(6, 5120, false);
    tensors.out[1].dims.d[0] = 7;
    EXPECT_NE(tensors.shapeChange(*plugin), 0);
    EXPECT_EQ(takeError(), "MhcCoefficients: output 1 (comb): expected shape [M=6, hc=4, hc=4], got [7, 4, 4]");

    std::vector<PluginField> fields = coefficientsFields();
    fields.push_back(integer("broadcast", kOne));
    auto const first = create("MhcCoefficients", fields);
    EXPECT_EQ(coefficientsTensors(6, 5120, true).shapeChange(*first), 0) << takeError();
    EXPECT_NE(coefficientsTensors(6, 5120, false).shapeChange(*first), 0);
    EXPECT_EQ(takeError(), "MhcCoefficients: input 0 (x): expected shape [M, H], got [6, 4, 5120]");
}

TEST(Coefficients, AskForTheWorkspaceOfTheProfilesLargestCall) {
    auto const size = [](nvinfer1::IPluginV3& plugin, Tensors const& tensors, int64_t least, int64_t most) {
        std::vector<nvinfer1::DynamicPluginTensorDesc> in;
        for (PluginTensorDesc const& each : tensors.in) {
            in.push_back({each, each.dims, each.dims, each.dims});
        }
        in[0].desc.dims.d[0] = -1;
        in[0].min.d[0] = least;
        in[0].max.d[0] = most;
        std::array<nvinfer1::DynamicPluginTensorDesc, 3> const out{};
        return build(plugin).getWorkspaceSize(in.data(), 4, out.data(), 3);
    };
    auto const plugin = create("MhcCoefficients", coefficientsFields());
    size_t const bytes = size(*plugin, coefficientsTensors(1, 5120, false), 1, 64);
    EXPECT_EQ(takeError(), "");
    EXPECT_EQ(bytes, mhcCoefficientsWorkspaceBytes(64, 5120, 0));
    size_t last = 0;
    for (int32_t rows = 0; rows <= 64; ++rows) {  // an engine for 64 rows serves every smaller call
        EXPECT_GE(mhcCoefficientsWorkspaceBytes(rows, 5120, 0), last);
        last = mhcCoefficientsWorkspaceBytes(rows, 5120, 0);
    }
    EXPECT_GT(last, 0U);
    std::vector<PluginField> fields = coefficientsFields();
    fields.push_back(integer("broadcast", kOne));
    EXPECT_EQ(
        size(*create("MhcCoefficients", fields), coefficientsTensors(1, 5120, true), 1, 64),
        mhcCoefficientsWorkspaceBytes(64, 5120, 1));
}

TEST(Coefficients, HaveNoGateAndNoGroup) {
    auto const plugin = create("MhcCoefficients", coefficientsFields());
    std::unique_ptr<nvinfer1::IPluginV3> const copy(plugin->clone());
    std::unique_ptr<nvinfer1::IPluginV3> const attached(runtime(*copy).attachToContext(nullptr));
    EXPECT_NE(coefficientsTensors(6, 5120, false).enqueue(*attached), 0);
    std::string const message = takeError();
    EXPECT_NE(message.find("mhcCoefficients"), std::string::npos) << message;
    EXPECT_EQ(serialized(*plugin), serialized(*attached));
    EXPECT_FALSE(has(serialized(*plugin), "tp_size"));
    std::unique_ptr<nvinfer1::IPluginV3> const again(
        creator("MhcCoefficients").createPlugin("", runtime(*plugin).getFieldsToSerialize(), TensorRTPhase::kRUNTIME));
    ASSERT_NE(again, nullptr);
    EXPECT_EQ(serialized(*plugin), serialized(*again));
}

TEST(PhaseGate, ARuntimeObjectWithoutACommunicatorIsAnError) {
    auto const prototype = create("MhcBoundary", plainFields());
    std::unique_ptr<nvinfer1::IPluginV3> const attached(runtime(*prototype).attachToContext(nullptr));
    ASSERT_NE(attached, nullptr) << "a context may be made before its communicator";
    EXPECT_NE(plainTensors(6).enqueue(*attached), 0);
    std::string const message = takeError();
    EXPECT_NE(message.find("no communicator for world ranks [0, 1]"), std::string::npos) << message;
    EXPECT_NE(message.find("communicator.bound()"), std::string::npos) << message;
}

// Null addresses are refused by whichever function the gate leads to, and the message names it.
void expectLocal(nvinfer1::IPluginV3& plugin, Tensors const& tensors, char const* function) {
    EXPECT_NE(tensors.enqueue(plugin), 0);
    std::string const message = takeError();
    EXPECT_NE(message.find(function), std::string::npos) << message;
}

TEST(PhaseGate, ObjectsOfTheBuildPhaseStayLocalThroughClonesAndContexts) {
    auto const prototype = create("MhcBoundary", plainFields(), TensorRTPhase::kBUILD);
    std::unique_ptr<nvinfer1::IPluginV3> const copy(prototype->clone());
    std::unique_ptr<nvinfer1::IPluginV3> const attached(runtime(*copy).attachToContext(nullptr));
    expectLocal(*attached, plainTensors(6), "mhcBoundaryLocal");
}

TEST(PhaseGate, OneRankNeedsNoCommunicator) {
    auto const plugin = create("MhcAllReduce", {integer("tp_size", kOne)});
    Tensors const tensors{{desc(DataType::kBF16, {6, 4096})}, {desc(DataType::kBF16, {6, 4096})}};
    expectLocal(*plugin, tensors, "mhcAllReduceLocal");
}

TEST(PhaseGate, WarmupClosesItForTheCallingThreadOnly) {
    auto const plugin = create("MhcBoundary", plainFields());
    EXPECT_EQ(mhcPluginSetWarmup(1), 0);
    expectLocal(*plugin, plainTensors(6), "mhcBoundaryLocal");
    std::string other;
    std::thread([&] {
        plainTensors(6).enqueue(*plugin);
        other = takeError();
    }).join();
    EXPECT_NE(other.find("no communicator"), std::string::npos) << other;
    EXPECT_EQ(mhcPluginSetWarmup(0), 1);
    EXPECT_NE(plainTensors(6).enqueue(*plugin), 0);
    EXPECT_NE(takeError().find("no communicator"), std::string::npos);
}

TEST(Errors, AreKeptPerThreadAndGivenOutOnce) {
    create("MhcAllReduce", {});
    std::thread([] { create("MhcBoundary", {}); }).join();
    std::array<char, 1024> text{};
    EXPECT_NE(takeError().find("MhcAllReduce"), std::string::npos);
    EXPECT_EQ(takeError(), "");
    EXPECT_GT(mhcPluginTakeError(text.data(), text.size(), 1), 0U);
    EXPECT_NE(std::string(text.data()).find("MhcBoundary"), std::string::npos);
    EXPECT_EQ(mhcPluginTakeError(text.data(), text.size(), 1), 0U);

    create("MhcAllReduce", {});
    std::array<char, 8> small{};
    EXPECT_GT(mhcPluginTakeError(small.data(), small.size(), 0), small.size());
    EXPECT_STREQ(small.data(), "MhcAllR");
    create("MhcAllReduce", {});
    EXPECT_GT(mhcPluginTakeError(nullptr, 0, 0), 0U);
}

TEST(PublishLinear, ChecksShapesAndTypesOfEveryCall) {
    for (bool const scaled : {false, true}) {
        std::vector<PluginField> fields{integer("tp_size", kTwo)};
        if (scaled)
            fields.push_back(integer("weight_type", kOne));
        auto const plugin = create("MhcPublishLinear", fields);
        for (int64_t const features : {128, 1024, 16384}) {
            EXPECT_EQ(publishLinearTensors(6, features, scaled).shapeChange(*plugin), 0) << takeError();
        }
        EXPECT_NE(publishLinearTensors(6, 1000, scaled).shapeChange(*plugin), 0);
        EXPECT_EQ(
            takeError(),
            "MhcPublishLinear: input 0 (activation): expected shape [M, K (a multiple of 128 up to 16384)], got "
            "[6, 1000]");
        Tensors tensors = publishLinearTensors(6, 1024, scaled);
        tensors.in[1].dims.d[1] = 2048;
        EXPECT_NE(tensors.shapeChange(*plugin), 0);
        EXPECT_EQ(takeError(), "MhcPublishLinear: input 1 (weight): expected shape [H, K=1024], got [5120, 2048]");
        tensors = publishLinearTensors(6, 1024, scaled);
        tensors.out[0].dims.d[0] = 7;
        EXPECT_NE(tensors.enqueue(*plugin), 0);
        EXPECT_EQ(takeError(), "MhcPublishLinear: output 0 (x): expected shape [M=6, H=5120], got [7, 5120]");
        EXPECT_NE(publishLinearTensors(6, 1024, !scaled).shapeChange(*plugin), 0);
        EXPECT_NE(takeError().find("expected"), std::string::npos);
    }
    std::vector<PluginField> const fields{integer("tp_size", kTwo), integer("weight_type", kOne)};
    auto const plugin = create("MhcPublishLinear", fields);
    Tensors tensors = publishLinearTensors(6, 1024, true);
    tensors.in[2].dims.d[0] = 161;
    EXPECT_NE(tensors.shapeChange(*plugin), 0);
    EXPECT_EQ(takeError(), "MhcPublishLinear: input 2 (scales): expected shape [H/32=160, K/128=8], got [161, 8]");
    tensors = publishLinearTensors(6, 1024, true);
    tensors.in[2].dims.d[1] = 32;
    EXPECT_NE(tensors.shapeChange(*plugin), 0);
    EXPECT_EQ(takeError(), "MhcPublishLinear: input 2 (scales): expected shape [H/32=160, K/128=8], got [160, 32]");
}

TEST(PublishLinear, CommunicatesOnlyAtRunTime) {
    auto const tensors = publishLinearTensors(6, 1024, false);
    auto const atRunTime = create("MhcPublishLinear", {integer("tp_size", kTwo)});
    EXPECT_NE(tensors.enqueue(*atRunTime), 0);
    EXPECT_NE(takeError().find("no communicator for world ranks [0, 1]"), std::string::npos);
    for (auto const& local :
         {create("MhcPublishLinear", {integer("tp_size", kTwo)}, TensorRTPhase::kBUILD),
          create("MhcPublishLinear", {integer("tp_size", kOne)})}) {
        EXPECT_NE(tensors.enqueue(*local), 0);
        EXPECT_NE(
            takeError().find("mhcPublishLinearLocal: MHC_INVALID_ARGUMENT: activation is NULL"), std::string::npos);
    }
}

}  // namespace
}  // namespace trtllm_mhc
