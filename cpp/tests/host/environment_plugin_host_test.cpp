// SPDX-License-Identifier: Apache-2.0
//
// Plugin objects whose communicator comes from the environment, as TensorRT makes, attaches and enqueues them; the
// ranks are threads with a device each. Kernels do nothing here (fake_cuda.cpp).
#include <NvInferRuntime.h>
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "common/plugin_api.h"
#include "creators.h"
#include "fake_cuda.h"
#include "mhc/mhc.h"

namespace trtllm_mhc {
namespace {

using nvinfer1::IPluginV3;
using Plugin = std::unique_ptr<IPluginV3>;

constexpr int32_t kHidden = 4096;

nvinfer1::IPluginV3OneRuntime& runtime(IPluginV3& plugin) {
    return *static_cast<nvinfer1::IPluginV3OneRuntime*>(
        plugin.getCapabilityInterface(nvinfer1::PluginCapabilityType::kRUNTIME));
}

// As an engine is deserialised: a plugin object for each of its layers.
Plugin makeLayer(int32_t tpSize = 2) {
    int32_t count = 0;
    auto* const* const creators = ownCreators(count);
    std::array<nvinfer1::PluginField, 1> const fields{
        nvinfer1::PluginField{"tp_size", &tpSize, nvinfer1::PluginFieldType::kINT32, 1}};
    nvinfer1::PluginFieldCollection const collection{1, fields.data()};
    for (int32_t i = 0; i < count; ++i) {
        auto* const creator = static_cast<nvinfer1::IPluginCreatorV3One*>(creators[i]);
        if (std::strcmp(creator->getPluginName(), "MhcAllReduce") == 0)
            return Plugin(creator->createPlugin("layer", &collection, nvinfer1::TensorRTPhase::kRUNTIME));
    }
    return nullptr;
}

using Engine = std::vector<Plugin>;
using Context = std::vector<Plugin>;

Engine makeEngine(size_t layers) {
    Engine engine;
    for (size_t i = 0; i < layers; ++i)
        engine.push_back(makeLayer());
    return engine;
}

// `resource` stands for TensorRT's IPluginResourceContext, which is only handed around.
Context makeContext(Engine const& engine, void* resource) {
    Context context;
    for (Plugin const& layer : engine) {
        auto* const given = static_cast<nvinfer1::IPluginResourceContext*>(resource);
        context.emplace_back(runtime(*layer).attachToContext(given));
    }
    return context;
}

// "" or the first layer's error.
std::string enqueue(Context const& context) {
    nvinfer1::PluginTensorDesc desc{};
    desc.type = nvinfer1::DataType::kBF16;
    desc.format = nvinfer1::TensorFormat::kLINEAR;
    desc.dims.nbDims = 2;
    desc.dims.d[0] = 1;
    desc.dims.d[1] = kHidden;
    alignas(16) static char x[2 * kHidden], sum[2 * kHidden];
    void const* const in[] = {x};
    void* const out[] = {sum};
    for (Plugin const& layer : context) {
        if (runtime(*layer).enqueue(&desc, &desc, in, out, nullptr, nullptr) != 0) {
            std::array<char, 1024> text{};
            mhcPluginTakeError(text.data(), text.size(), 0);
            return text.data();
        }
    }
    return "";
}

bool contains(std::string const& text, std::string const& part) {
    return text.find(part) != std::string::npos;
}

class EnvironmentPlugin : public testing::Test {
protected:
    void SetUp() override {
        setenv("TRTLLM_MHC_RENDEZVOUS", "threads", 1);
        setenv("TRTLLM_MHC_TIMEOUT_MS", "20000", 1);
    }
    void TearDown() override {
        unsetenv("TRTLLM_MHC_RENDEZVOUS");
        unsetenv("TRTLLM_MHC_TIMEOUT_MS");
        fakeCapturing = false;
    }
    template <typename Work>
    static void onRanks(Work work) {
        std::vector<std::thread> threads;
        for (int rank = 0; rank < 2; ++rank) {
            threads.emplace_back([&, rank] {
                cudaSetDevice(rank);
                work(rank);
            });
        }
        for (std::thread& thread : threads)
            thread.join();
    }
};

TEST_F(EnvironmentPlugin, TheGroupMeetsInTheFirstEnqueueThatDoesNotCapture) {
    fakeCapturing = true;
    std::vector<Engine> engines(2);
    std::vector<Context> contexts(2);
    onRanks([&](int rank) {
        engines[rank] = makeEngine(3);
        contexts[rank] = makeContext(engines[rank], &engines[rank]);
        std::string const error = enqueue(contexts[rank]);
        // Later tests of this process find the communicator that this one makes.
        EXPECT_TRUE(error.empty() || contains(error, "run every rank's engine once before capturing")) << error;
    });
    fakeCapturing = false;
    onRanks([&](int rank) { EXPECT_EQ(enqueue(contexts[rank]), ""); });
    fakeCapturing = true;
    onRanks([&](int rank) { EXPECT_EQ(enqueue(contexts[rank]), ""); });
}

TEST_F(EnvironmentPlugin, ASecondContextOfAnEngineIsRefusedWhileTheFirstIsThere) {
    onRanks([&](int) {
        Engine const engine = makeEngine(1);
        int resources[3];
        Context first = makeContext(engine, &resources[0]);
        EXPECT_EQ(enqueue(first), "");
        Context const second = makeContext(engine, &resources[1]);
        std::string const error = enqueue(second);
        EXPECT_TRUE(contains(error, "one lane, which another execution context of this process uses")) << error;
        EXPECT_TRUE(contains(error, "Communicator.from_environment(lanes=2, ...)")) << error;
        EXPECT_EQ(enqueue(first), "");
        first.clear();
        EXPECT_EQ(enqueue(second), "");
    });
}

TEST_F(EnvironmentPlugin, AContextOfAnotherEngineIsRefusedOnceResourceContextsAreKnownToBeContexts) {
    onRanks([&](int) {
        Engine const one = makeEngine(2), other = makeEngine(2);
        int resources[2];
        Context const first = makeContext(one, &resources[0]);
        EXPECT_EQ(enqueue(first), "");
        Context const second = makeContext(other, &resources[1]);
        EXPECT_TRUE(contains(enqueue(second), "another execution context of this process uses"));
    });
}

TEST_F(EnvironmentPlugin, WithoutVariablesTheErrorSaysBothWays) {
    unsetenv("TRTLLM_MHC_RENDEZVOUS");
    Engine const engine = makeEngine(1);
    std::string const error = enqueue(makeContext(engine, nullptr));
    EXPECT_TRUE(contains(error, "no communicator for world ranks [0, 1]")) << error;
    EXPECT_TRUE(contains(error, "run it under torchrun or mpirun")) << error;
    EXPECT_TRUE(contains(error, "with communicator.bound()")) << error;
}

}  // namespace
}  // namespace trtllm_mhc
