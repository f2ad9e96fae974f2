// SPDX-License-Identifier: Apache-2.0
#include "common/fields.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <set>
#include <sstream>

#include "common/errors.h"

namespace trtllm_mhc {
namespace {

using nvinfer1::PluginField;
using nvinfer1::PluginFieldCollection;
using nvinfer1::PluginFieldType;

constexpr int32_t kMaxFields = 64;    // far above any table of ours: a larger count is a broken collection
constexpr size_t kMaxShownName = 64;  // of a name from outside, in a message
constexpr char kFormatName[] = "format";

std::string typeName(PluginFieldType type) {
    switch (type) {
        case PluginFieldType::kFLOAT16:
            return "FLOAT16";
        case PluginFieldType::kFLOAT32:
            return "FLOAT32";
        case PluginFieldType::kFLOAT64:
            return "FLOAT64";
        case PluginFieldType::kINT8:
            return "INT8";
        case PluginFieldType::kINT16:
            return "INT16";
        case PluginFieldType::kINT32:
            return "INT32";
        case PluginFieldType::kCHAR:
            return "CHAR";
        case PluginFieldType::kINT64:
            return "INT64";
        case PluginFieldType::kBF16:
            return "BF16";
        default:
            return "type " + std::to_string(static_cast<int32_t>(type));
    }
}

// A name or text from outside, made fit for one line of a log.
std::string shown(char const* text, size_t length) {
    std::string result(text, std::min(length, kMaxShownName));
    for (char& character : result) {
        if (character < ' ' || character > '~') {
            character = '?';
        }
    }
    return result + (length > kMaxShownName ? "..." : "");
}

[[noreturn]] void fail(char const* name, std::string const& expected, std::string const& got) {
    throw PluginError(std::string("field \"") + name + "\": expected " + expected + ", got " + got);
}

template <typename T>
std::vector<T> readElements(PluginField const& field, FieldSpec const& spec) {
    std::vector<T> values(static_cast<size_t>(field.length));
    if (!values.empty()) {
        // memcpy: nothing promises that a serialized engine keeps the data aligned.
        std::memcpy(values.data(), field.data, values.size() * sizeof(T));
    }
    for (T const value : values) {
        if (spec.accepts != nullptr && !spec.accepts(static_cast<double>(value))) {
            std::ostringstream got;
            got << value;
            fail(spec.name, spec.expected, got.str());
        }
    }
    return values;
}

void checkLayout(PluginField const& field, FieldSpec const& spec) {
    if (field.type != spec.type) {
        fail(spec.name, typeName(spec.type), typeName(field.type));
    }
    int32_t const minLength = spec.maxLength == 1 ? 1 : 0;
    if (field.length < minLength || field.length > spec.maxLength) {
        std::string const expected =
            spec.maxLength == 1 ? "1 value" : "0 to " + std::to_string(spec.maxLength) + " values";
        fail(spec.name, expected, std::to_string(field.length));
    }
    if (field.length > 0 && field.data == nullptr) {
        fail(spec.name, std::to_string(field.length) + " value(s)", "a null pointer");
    }
}

std::string knownNames(std::vector<FieldSpec> const& specs) {
    std::string names;
    for (FieldSpec const& spec : specs) {
        names += (names.empty() ? "" : ", ") + std::string(spec.name);
    }
    return names;
}

bool named(PluginField const& field, char const* name) {
    return std::strcmp(field.name, name) == 0;
}

// Before anything else, so that fields of a newer format are not reported as merely unknown.
void checkFormat(PluginFieldCollection const& collection) {
    for (int32_t i = 0; i < collection.nbFields; ++i) {
        PluginField const& field = collection.fields[i];
        if (!named(field, kFormatName) || field.type != PluginFieldType::kINT32 || field.length != 1 ||
            field.data == nullptr) {
            continue;
        }
        int32_t format = 0;
        std::memcpy(&format, field.data, sizeof(format));
        if (format > kFieldFormat) {
            throw PluginError(
                "the fields have format " + std::to_string(format) + ", but this library reads format " +
                std::to_string(kFieldFormat) +
                " at most: the network or engine was made by a newer trtllm_mhc; update the library");
        }
    }
}

void checkCollection(PluginFieldCollection const* collection) {
    if (collection == nullptr) {
        throw PluginError("expected a field collection, got a null pointer");
    }
    if (collection->nbFields < 0 || collection->nbFields > kMaxFields) {
        throw PluginError(
            "expected 0 to " + std::to_string(kMaxFields) + " fields, got " + std::to_string(collection->nbFields));
    }
    if (collection->nbFields > 0 && collection->fields == nullptr) {
        throw PluginError("expected " + std::to_string(collection->nbFields) + " fields, got a null pointer");
    }
    for (int32_t i = 0; i < collection->nbFields; ++i) {
        if (collection->fields[i].name == nullptr) {
            throw PluginError("expected a name for field " + std::to_string(i) + ", got a null pointer");
        }
    }
}

}  // namespace

FieldValues::FieldValues(PluginFieldCollection const* collection, std::vector<FieldSpec> const& specs) {
    checkCollection(collection);
    checkFormat(*collection);
    std::set<std::string> seen;
    for (int32_t i = 0; i < collection->nbFields; ++i) {
        PluginField const& field = collection->fields[i];
        auto const spec =
            std::find_if(specs.begin(), specs.end(), [&](FieldSpec const& each) { return named(field, each.name); });
        if (spec == specs.end()) {
            throw PluginError(
                "unknown field \"" + shown(field.name, std::strlen(field.name)) + "\": this library (format " +
                std::to_string(kFieldFormat) + ") knows " + knownNames(specs) +
                "; the name is wrong, or a newer trtllm_mhc wrote it");
        }
        if (!seen.insert(spec->name).second) {
            throw PluginError(std::string("field \"") + spec->name + "\": expected once, got twice");
        }
        checkLayout(field, *spec);
        if (spec->type == PluginFieldType::kINT32) {
            integers_[spec->name] = readElements<int32_t>(field, *spec);
        } else if (spec->type == PluginFieldType::kFLOAT32) {
            reals_[spec->name] = readElements<float>(field, *spec).front();
        } else {
            char const* text = static_cast<char const*>(field.data);
            texts_[spec->name] = shown(text, field.length > 0 ? strnlen(text, static_cast<size_t>(field.length)) : 0);
        }
    }
    for (FieldSpec const& spec : specs) {
        if (spec.required && seen.count(spec.name) == 0) {
            throw PluginError(
                std::string("field \"") + spec.name + "\" is required (" + typeName(spec.type) + ", " + spec.expected +
                "), but missing");
        }
    }
}

bool FieldValues::has(char const* name) const {
    return integers_.count(name) + reals_.count(name) + texts_.count(name) > 0;
}

int32_t FieldValues::integer(char const* name, int32_t absent) const {
    auto const found = integers_.find(name);
    return found == integers_.end() ? absent : found->second.front();
}

float FieldValues::real(char const* name, float absent) const {
    auto const found = reals_.find(name);
    return found == reals_.end() ? absent : found->second;
}

std::vector<int32_t> FieldValues::integers(char const* name) const {
    auto const found = integers_.find(name);
    return found == integers_.end() ? std::vector<int32_t>{} : found->second;
}

std::string FieldValues::text(char const* name, char const* absent) const {
    auto const found = texts_.find(name);
    return found == texts_.end() ? absent : found->second;
}

void FieldList::clear() {
    fields_.clear();
    isList_.clear();
}

void FieldList::append(char const* name, void const* data, PluginFieldType type, size_t length, bool isList) {
    fields_.emplace_back(name, data, type, static_cast<int32_t>(length));
    isList_.push_back(isList);
}

void FieldList::add(char const* name, int32_t const& value) {
    append(name, &value, PluginFieldType::kINT32, 1, false);
}

void FieldList::add(char const* name, float const& value) {
    append(name, &value, PluginFieldType::kFLOAT32, 1, false);
}

void FieldList::add(char const* name, std::vector<int32_t> const& values) {
    append(name, values.data(), PluginFieldType::kINT32, values.size(), true);
}

void FieldList::add(char const* name, std::string const& value) {
    append(name, value.data(), PluginFieldType::kCHAR, value.size(), false);
}

void FieldList::declare(FieldSpec const& spec) {
    append(spec.name, nullptr, spec.type, spec.maxLength == 1 ? 1 : 0, spec.maxLength > 1);
}

PluginFieldCollection const* FieldList::collection() {
    collection_.nbFields = static_cast<int32_t>(fields_.size());
    collection_.fields = fields_.data();
    return &collection_;
}

std::string FieldList::text() const {
    std::ostringstream text;
    text.precision(std::numeric_limits<float>::max_digits10);
    for (size_t index = 0; index < fields_.size(); ++index) {
        PluginField const& field = fields_[index];
        text << (index == 0 ? "" : " ") << field.name << '=';
        if (field.type == PluginFieldType::kCHAR) {
            text.write(static_cast<char const*>(field.data), field.length);
        } else if (field.type == PluginFieldType::kFLOAT32) {
            text << *static_cast<float const*>(field.data);
        } else {
            auto const* values = static_cast<int32_t const*>(field.data);
            text << (isList_[index] ? "[" : "");
            for (int32_t i = 0; i < field.length; ++i) {
                text << (i == 0 ? "" : ",") << values[i];
            }
            text << (isList_[index] ? "]" : "");
        }
    }
    return text.str();
}

bool isFlag(double value) {
    return value == 0 || value == 1;
}

bool isTpSize(double value) {
    return value == 1 || value == 2 || value == 4 || value == 8;
}

}  // namespace trtllm_mhc
