// SPDX-License-Identifier: Apache-2.0
//
// Attributes of a plugin as a table: one row per field says its type, length and range. The table makes the creator's
// field list and checks every collection that comes in, from a network, an ONNX file or a serialized engine.
#ifndef TRTLLM_MHC_PLUGINS_COMMON_FIELDS_H
#define TRTLLM_MHC_PLUGINS_COMMON_FIELDS_H

#include <NvInferRuntime.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace trtllm_mhc {

// The newest layout of the serialized fields that this library reads. Raise it with every change of a field.
constexpr int32_t kFieldFormat = 1;

struct FieldSpec {
    char const* name;
    nvinfer1::PluginFieldType type;  // kINT32, kFLOAT32 or kCHAR
    int32_t maxLength;               // 1: a scalar; more: a list that may be empty
    bool required;
    char const* expected;     // the accepted values in words, for messages
    bool (*accepts)(double);  // of every element; null: every value, and always for kCHAR
};

// The checked values of one collection.
class FieldValues {
public:
    // Throws PluginError naming the field, what was expected and what came.
    FieldValues(nvinfer1::PluginFieldCollection const* collection, std::vector<FieldSpec> const& specs);

    bool has(char const* name) const;
    int32_t integer(char const* name, int32_t absent) const;
    float real(char const* name, float absent) const;
    std::vector<int32_t> integers(char const* name) const;
    std::string text(char const* name, char const* absent) const;

private:
    std::map<std::string, std::vector<int32_t>> integers_;
    std::map<std::string, float> reals_;
    std::map<std::string, std::string> texts_;
};

// A collection to hand out. It points to the values given, which must live as long as it is read.
class FieldList {
public:
    void clear();
    void add(char const* name, int32_t const& value);
    void add(char const* name, float const& value);
    void add(char const* name, std::vector<int32_t> const& values);
    void add(char const* name, std::string const& value);
    void declare(FieldSpec const& spec);
    nvinfer1::PluginFieldCollection const* collection();
    // "name=value name=[value,value]" of all fields, floats with every digit that float32 needs. Free of quotes, since
    // nothing says that the engine inspector escapes them.
    std::string text() const;

private:
    std::vector<nvinfer1::PluginField> fields_;
    std::vector<bool> isList_;  // of each field: a list of one value is not a scalar
    nvinfer1::PluginFieldCollection collection_{};

    void append(char const* name, void const* data, nvinfer1::PluginFieldType type, size_t length, bool isList);
};

// Ranges that several tables share.
bool isFlag(double value);
bool isTpSize(double value);

}  // namespace trtllm_mhc

#endif  // TRTLLM_MHC_PLUGINS_COMMON_FIELDS_H
