// SPDX-License-Identifier: Apache-2.0
//
// Serialised plugin fields as a damaged or hostile engine holds them. TensorRT hands them to the creator; an object
// that the creator makes must write fields that make it again.
#include <NvInferRuntime.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "creators.h"
#include "input.h"

namespace {

using nvinfer1::IPluginCreatorV3One;
using nvinfer1::IPluginV3;
using nvinfer1::IPluginV3OneRuntime;
using nvinfer1::PluginField;
using nvinfer1::PluginFieldCollection;
using nvinfer1::PluginFieldType;
using nvinfer1::TensorRTPhase;

size_t sizeOf(PluginFieldType type) {
    switch (type) {
        case PluginFieldType::kFLOAT64:
        case PluginFieldType::kINT64:
            return 8;
        case PluginFieldType::kINT32:
        case PluginFieldType::kFLOAT32:
            return 4;
        default:
            return 1;
    }
}

// Values that some field accepts: what is left to chance is which.
std::vector<uint8_t> plausible(PluginFieldType type, uint8_t choice) {
    constexpr int32_t kIntegers[] = {1, 4, 2, 0, 8, 20, -1, 5120};
    constexpr float kReals[] = {1e-20F, 2.0F, 0.0F, 1e-6F};
    std::vector<uint8_t> value(4);
    if (type == PluginFieldType::kFLOAT32)
        std::memcpy(value.data(), &kReals[choice % 4], 4);
    else if (type == PluginFieldType::kINT32)
        std::memcpy(value.data(), &kIntegers[choice % 8], 4);
    else
        value.assign({'o', 'n', 'e', 's', 'h', 'o', 't'});
    return value;
}

// Read back, an object's fields must make the same object.
void remake(IPluginCreatorV3One& creator, IPluginV3& plugin) {
    auto* const runtime =
        static_cast<IPluginV3OneRuntime*>(plugin.getCapabilityInterface(nvinfer1::PluginCapabilityType::kRUNTIME));
    if (runtime == nullptr)
        __builtin_trap();
    PluginFieldCollection const* const fields = runtime->getFieldsToSerialize();
    if (fields == nullptr)
        __builtin_trap();
    IPluginV3* const again = creator.createPlugin("again", fields, TensorRTPhase::kRUNTIME);
    if (again == nullptr)
        __builtin_trap();
    delete again->clone();
    delete again;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(uint8_t const* data, size_t size) {
    Input input(data, size);
    int32_t count = 0;
    auto* const* const creators = trtllm_mhc::ownCreators(count);
    auto& creator = static_cast<IPluginCreatorV3One&>(*creators[input.byte() % count]);
    PluginFieldCollection const* const known = creator.getFieldNames();

    std::vector<PluginField> fields;
    std::vector<std::string> names;
    std::vector<std::vector<uint8_t>> values;
    size_t const entries = input.byte() % 24;
    bool const completes = (input.byte() & 1u) != 0;
    size_t const most = entries + static_cast<size_t>(known->nbFields);
    names.reserve(most);
    values.reserve(most);
    for (size_t i = 0; i < entries; ++i) {
        uint8_t const which = input.byte();
        uint8_t const form = input.byte();
        PluginField const& spec = known->fields[which % known->nbFields];
        names.emplace_back(spec.name);
        if (which >= 0xF8) {
            auto const odd = input.bytes(which & 7u);
            names.back().assign(odd.begin(), odd.end());
        }
        // Mostly the declared type and length; otherwise another, with as many bytes as that promises.
        auto const type = form < 0xE0 ? spec.type : static_cast<PluginFieldType>(form & 15u);
        int32_t length = spec.type == PluginFieldType::kCHAR ? form % 20 : (form & 1u) != 0 ? form % 10 : 1;
        bool const absent = form == 0xFF;
        values.push_back(input.bytes(static_cast<size_t>(length) * sizeOf(type)));
        if (form == 0xDF)
            length = -static_cast<int32_t>(which);
        fields.emplace_back(names.back().c_str(), absent ? nullptr : values.back().data(), type, length);
    }
    for (int32_t i = 0; completes && i < known->nbFields; ++i) {
        PluginField const& spec = known->fields[i];
        uint8_t const choice = input.byte();
        bool const isThere = std::find(names.begin(), names.end(), spec.name) != names.end();
        if (isThere || choice >= 0xC0)
            continue;
        names.emplace_back(spec.name);
        values.push_back(plausible(spec.type, choice));
        auto const length = static_cast<int32_t>(values.back().size() / sizeOf(spec.type));
        fields.emplace_back(names.back().c_str(), values.back().data(), spec.type, length);
    }
    // TensorRT gives creators NUL-terminated names; the values lie where they were read.
    PluginFieldCollection const collection{static_cast<int32_t>(fields.size()), fields.data()};
    for (TensorRTPhase const phase : {TensorRTPhase::kBUILD, TensorRTPhase::kRUNTIME}) {
        IPluginV3* const plugin = creator.createPlugin("fuzzed", &collection, phase);
        if (plugin == nullptr)
            continue;
        remake(creator, *plugin);
        delete plugin;
    }
    return 0;
}
