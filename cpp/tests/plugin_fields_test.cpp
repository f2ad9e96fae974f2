// SPDX-License-Identifier: Apache-2.0
//
// Field collections as a broken caller, a damaged engine or a newer library would hand them over.
#include <gtest/gtest.h>

#include <climits>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "common/errors.h"
#include "common/fields.h"

namespace trtllm_mhc {
namespace {

using nvinfer1::PluginField;
using nvinfer1::PluginFieldCollection;
using nvinfer1::PluginFieldType;

std::vector<FieldSpec> const kSpecs{
    {"format", PluginFieldType::kINT32, 1, false, "1", [](double value) { return value == kFieldFormat; }},
    {"tp_size", PluginFieldType::kINT32, 1, true, "1, 2, 4 or 8", isTpSize},
    {"group", PluginFieldType::kINT32, 8, false, "0 or more", [](double value) { return value >= 0; }},
    {"norm_eps", PluginFieldType::kFLOAT32, 1, false, "a finite number",
     [](double value) { return std::isfinite(value); }},
    {"strategy", PluginFieldType::kCHAR, 16, false, "a name", nullptr},
};

int32_t const kTwo = 2;
PluginField const kTpSize{"tp_size", &kTwo, PluginFieldType::kINT32, 1};

// The message of the refusal, or "" where the fields are accepted.
std::string refusal(std::vector<PluginField> const& fields) {
    PluginFieldCollection const collection{static_cast<int32_t>(fields.size()), fields.data()};
    try {
        FieldValues const values(&collection, kSpecs);
        return "";
    } catch (PluginError const& error) {
        return error.what();
    }
}

std::string refusal(PluginFieldCollection const* collection) {
    try {
        FieldValues const values(collection, kSpecs);
        return "";
    } catch (PluginError const& error) {
        return error.what();
    }
}

TEST(FieldValues, ReadsWhatIsThereAndDefaultsTheRest) {
    std::vector<int32_t> const group{3, 1};
    float const eps = 1e-20F;
    std::vector<PluginField> const fields{
        kTpSize,
        {"group", group.data(), PluginFieldType::kINT32, 2},
        {"norm_eps", &eps, PluginFieldType::kFLOAT32, 1},
        {"strategy", "oneshot\0\0", PluginFieldType::kCHAR, 9}};
    PluginFieldCollection const collection{4, fields.data()};
    FieldValues const values(&collection, kSpecs);
    EXPECT_EQ(values.integer("tp_size", 1), 2);
    EXPECT_EQ(values.integers("group"), group);
    EXPECT_EQ(values.real("norm_eps", 0.0F), eps);
    EXPECT_EQ(values.text("strategy", ""), "oneshot");
    EXPECT_FALSE(values.has("format"));
    EXPECT_EQ(values.integer("format", 7), 7);
}

TEST(FieldValues, ReadsDataThatIsNotAligned) {
    alignas(8) char buffer[16] = {};
    int32_t const four = 4;
    std::memcpy(buffer + 1, &four, sizeof(four));
    std::vector<PluginField> const fields{{"tp_size", buffer + 1, PluginFieldType::kINT32, 1}};
    PluginFieldCollection const collection{1, fields.data()};
    EXPECT_EQ(FieldValues(&collection, kSpecs).integer("tp_size", 0), 4);
}

TEST(FieldValues, RefusesBrokenCollections) {
    EXPECT_EQ(refusal(nullptr), "expected a field collection, got a null pointer");
    PluginFieldCollection const negative{-1, &kTpSize};
    EXPECT_EQ(refusal(&negative), "expected 0 to 64 fields, got -1");
    PluginFieldCollection const huge{INT_MAX, &kTpSize};
    EXPECT_EQ(refusal(&huge), "expected 0 to 64 fields, got 2147483647");
    PluginFieldCollection const nothing{3, nullptr};
    EXPECT_EQ(refusal(&nothing), "expected 3 fields, got a null pointer");
    EXPECT_EQ(
        refusal({kTpSize, {nullptr, &kTwo, PluginFieldType::kINT32, 1}}),
        "expected a name for field 1, got a null pointer");
}

TEST(FieldValues, RefusesWrongLayoutsNamingExpectedAndGot) {
    int64_t const wide = 2;
    EXPECT_EQ(
        refusal({{"tp_size", &wide, PluginFieldType::kINT64, 1}}), "field \"tp_size\": expected INT32, got INT64");
    EXPECT_EQ(
        refusal({{"tp_size", &wide, static_cast<PluginFieldType>(99), 1}}),
        "field \"tp_size\": expected INT32, got type 99");
    EXPECT_EQ(
        refusal({{"tp_size", nullptr, PluginFieldType::kINT32, 1}}),
        "field \"tp_size\": expected 1 value(s), got a null pointer");
    for (int32_t const length : {INT_MIN, -1, 0, 2, INT_MAX}) {
        EXPECT_EQ(
            refusal({{"tp_size", &kTwo, PluginFieldType::kINT32, length}}),
            "field \"tp_size\": expected 1 value, got " + std::to_string(length));
    }
    EXPECT_EQ(
        refusal({kTpSize, {"group", &kTwo, PluginFieldType::kINT32, INT_MAX}}),
        "field \"group\": expected 0 to 8 values, got 2147483647");
    EXPECT_EQ(refusal({kTpSize, {"group", nullptr, PluginFieldType::kINT32, 0}}), "");
}

TEST(FieldValues, RefusesWrongValuesNamingExpectedAndGot) {
    int32_t const three = 3;
    EXPECT_EQ(
        refusal({{"tp_size", &three, PluginFieldType::kINT32, 1}}), "field \"tp_size\": expected 1, 2, 4 or 8, got 3");
    int32_t const group[] = {0, -5};
    EXPECT_EQ(
        refusal({kTpSize, {"group", group, PluginFieldType::kINT32, 2}}),
        "field \"group\": expected 0 or more, got -5");
    float const eps = std::nanf("");
    EXPECT_EQ(
        refusal({kTpSize, {"norm_eps", &eps, PluginFieldType::kFLOAT32, 1}}),
        "field \"norm_eps\": expected a finite number, got nan");
}

TEST(FieldValues, RefusesMissingDoubleAndUnknownFields) {
    EXPECT_EQ(refusal(std::vector<PluginField>{}), "field \"tp_size\" is required (INT32, 1, 2, 4 or 8), but missing");
    EXPECT_EQ(refusal({kTpSize, kTpSize}), "field \"tp_size\": expected once, got twice");
    std::string const message = refusal({kTpSize, {"tp_sise", &kTwo, PluginFieldType::kINT32, 1}});
    EXPECT_NE(message.find("unknown field \"tp_sise\""), std::string::npos) << message;
    EXPECT_NE(message.find("format, tp_size, group, norm_eps, strategy"), std::string::npos) << message;
}

TEST(FieldValues, SaysThatANewerLibraryWroteThem) {
    int32_t const newer = kFieldFormat + 1;
    std::string const message = refusal(
        {{"new_thing", &kTwo, PluginFieldType::kINT32, 1}, kTpSize, {"format", &newer, PluginFieldType::kINT32, 1}});
    EXPECT_NE(message.find("format 2"), std::string::npos) << message;
    EXPECT_NE(message.find("newer trtllm_mhc"), std::string::npos) << message;
    int32_t const older = 0;
    EXPECT_EQ(
        refusal({kTpSize, {"format", &older, PluginFieldType::kINT32, 1}}), "field \"format\": expected 1, got 0");
}

TEST(FieldValues, PutsForeignNamesOnOneShortLine) {
    std::string const name = std::string("evil\n\x1b[31m") + std::string(5000, 'x');
    std::string const message = refusal({kTpSize, {name.c_str(), &kTwo, PluginFieldType::kINT32, 1}});
    EXPECT_LT(message.size(), 400U);
    EXPECT_EQ(message.find('\n'), std::string::npos);
    EXPECT_EQ(message.find('\x1b'), std::string::npos);
}

// Every collection is either read or refused; run under a sanitizer this also finds reads outside the data.
TEST(FieldValues, SurvivesRandomCollections) {
    std::mt19937 random(20260901);
    auto const pick = [&](auto const& values) { return values[random() % std::size(values)]; };
    std::vector<char const*> const names{"format", "tp_size", "group", "norm_eps", "strategy", "other", "", nullptr};
    std::vector<int32_t> const lengths{INT_MIN, -1, 0, 1, 1, 1, 2, 8, 9, 16, INT_MAX};
    std::vector<int32_t> data(16);
    int accepted = 0;
    for (int round = 0; round < 20000; ++round) {
        for (int32_t& value : data) {
            value = static_cast<int32_t>(random() % 4 == 0 ? random() : random() % 5);
        }
        std::vector<PluginField> fields;
        for (size_t i = 0; i < random() % 5; ++i) {
            auto const type = static_cast<PluginFieldType>(random() % 3 == 0 ? random() % 14 : 5);
            void const* const at = random() % 8 == 0 ? nullptr : static_cast<void const*>(data.data());
            fields.emplace_back(pick(names), at, type, pick(lengths));
        }
        accepted += refusal(fields).empty() ? 1 : 0;
    }
    EXPECT_GT(accepted, 0);
    EXPECT_LT(accepted, 10000);
}

TEST(FieldList, WritesTextThatKeepsEveryFloat) {
    int32_t const size = 2;
    float const eps = 1e-20F;
    std::vector<int32_t> const one{7};
    std::string const text = "oneshot";
    FieldList list;
    list.add("size", size);
    list.add("eps", eps);
    list.add("group", one);
    list.add("strategy", text);
    EXPECT_EQ(list.text(), "size=2 eps=9.99999968e-21 group=[7] strategy=oneshot");
    EXPECT_EQ(std::stof("9.99999968e-21"), eps);
}

}  // namespace
}  // namespace trtllm_mhc
