// SPDX-License-Identifier: Apache-2.0
#include "common/communication.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <set>

#include "common/copies.h"
#include "common/errors.h"
#include "common/plugin_api.h"

namespace trtllm_mhc {
namespace {

thread_local int32_t threadWarmup = 0;

bool isRankOrUnset(double value) {
    return value >= -1 && value < MHC_MAX_RANKS;
}

bool isWorldRank(double value) {
    return value >= 0;
}

// The plugin objects that use the lane of an environment's communicator: all of one execution context.
class LaneUsers {
public:
    static LaneUsers& instance() {
        static auto* const users = new LaneUsers;  // never destroyed: plugins may outlive static destruction
        return *users;
    }

    // False when another context is using it.
    bool enter(mhcComm_t comm, ContextIdentity const& context) {
        std::lock_guard<std::mutex> const lock(mutex_);
        std::vector<ContextIdentity>& users = users_[comm];
        bool const taken = std::any_of(users.begin(), users.end(), [&](ContextIdentity const& user) {
            return ContextIdentity::apart(user, context);
        });
        if (!taken) {
            users.push_back(context);
        }
        return !taken;
    }

    void leave(mhcComm_t comm, ContextIdentity const& context) {
        std::lock_guard<std::mutex> const lock(mutex_);
        std::vector<ContextIdentity>& users = users_[comm];
        users.erase(std::find_if(users.begin(), users.end(), [&](ContextIdentity const& user) {
            return user.origin == context.origin;
        }));
    }

private:
    std::mutex mutex_;
    std::map<mhcComm_t, std::vector<ContextIdentity>> users_;
};

// TensorRT promises different resource contexts for different execution contexts, but not the same one for all plugins
// of one, which 10.6 has. Set once that has been seen.
std::atomic<bool> resourceIsContext{false};
thread_local ContextIdentity lastAttached;

}  // namespace

GroupAttributes::GroupAttributes(FieldValues const& values)
    : tpSize(values.integer("tp_size", 1)), rank(values.integer("rank", -1)), group(values.integers("group")) {
    if (rank >= tpSize) {
        throw PluginError(
            "field \"rank\": expected -1 to tp_size-1 = " + std::to_string(tpSize - 1) + ", got " +
            std::to_string(rank));
    }
    if (!group.empty() && group.size() != static_cast<size_t>(tpSize)) {
        throw PluginError(
            "field \"group\": expected tp_size = " + std::to_string(tpSize) + " world ranks, got " +
            std::to_string(group.size()));
    }
    if (std::set<int32_t>(group.begin(), group.end()).size() != group.size()) {
        throw PluginError("field \"group\": expected distinct world ranks, got " + groupText());
    }
}

std::vector<FieldSpec> GroupAttributes::fieldSpecs() {
    using nvinfer1::PluginFieldType;
    return {
        {"tp_size", PluginFieldType::kINT32, 1, true, "1, 2, 4 or 8", isTpSize},
        {"rank", PluginFieldType::kINT32, 1, false, "-1 (the communicator's) to tp_size-1", isRankOrUnset},
        {"group", PluginFieldType::kINT32, MHC_MAX_GROUP, false, "world ranks of 0 or more", isWorldRank},
    };
}

void GroupAttributes::serialize(FieldList& fields) const {
    fields.add("tp_size", tpSize);
    if (rank >= 0) {
        fields.add("rank", rank);
    }
    if (!group.empty()) {
        fields.add("group", group);
    }
}

std::string GroupAttributes::groupText() const {
    std::string text;
    for (int32_t i = 0; i < (group.empty() ? tpSize : static_cast<int32_t>(group.size())); ++i) {
        int32_t const worldRank = group.empty() ? i : group[static_cast<size_t>(i)];
        text += (text.empty() ? "" : ", ") + std::to_string(worldRank);
    }
    return "[" + text + "]";
}

bool ContextIdentity::apart(ContextIdentity const& a, ContextIdentity const& b) {
    return a.origin == b.origin || (resourceIsContext && a.resource != b.resource);
}

void ContextIdentity::learn(ContextIdentity const& attached) {
    // A thread makes one context after the other, so neighbours with one resource context belong together.
    if (attached.resource != nullptr && attached.resource == lastAttached.resource &&
        attached.origin != lastAttached.origin) {
        resourceIsContext = true;
    }
    lastAttached = attached;
}

CommunicatorBinding::~CommunicatorBinding() {
    if (context_.origin != 0) {
        LaneUsers::instance().leave(comm_, context_);
    } else if (comm_ != nullptr) {
        mhcCommRelease(comm_);
    }
}

void CommunicatorBinding::tryBind(GroupAttributes const& attributes) {
    if (comm_ != nullptr) {
        return;
    }
    mhcComm_t comm = nullptr;
    int32_t lane = 0;
    int32_t const groupSize = static_cast<int32_t>(attributes.group.size());
    // Whatever the reason, the next enqueue tries again and then says it.
    if (mhcCommFind(attributes.tpSize, attributes.group.data(), groupSize, &comm, &lane) != MHC_SUCCESS) {
        return;
    }
    info_.struct_size = sizeof(info_);
    checkStatus("mhcCommGetInfo", mhcCommGetInfo(comm, &info_));
    checkStatus("mhcCommRetain", mhcCommRetain(comm));
    comm_ = comm;
    lane_ = lane;
}

void CommunicatorBinding::bindFromEnvironment(
    GroupAttributes const& attributes, int64_t hidden, ContextIdentity context, cudaStream_t stream) {
    mhcCommConfig config{};
    config.struct_size = sizeof(config);
    config.tp_size = attributes.tpSize;
    config.rank = attributes.rank;
    config.device = -1;
    config.hidden_size = static_cast<int32_t>(hidden);
    config.lanes = 1;
    config.on_error = -1;
    config.group_size = static_cast<int32_t>(attributes.group.size());
    config.group = attributes.group.data();
    mhcComm_t comm = nullptr;
    mhcStatus const status = mhcCommFindEnvironment(&comm, &config, stream);
    if (status == MHC_NOT_BOUND) {
        return;
    }
    if (status != MHC_SUCCESS) {
        throw PluginError(
            std::string("making a communicator from the environment, since this process has made none: ") +
            mhcStatusName(status) + ": " + mhcLastError() + " (docs/ranks.md)");
    }
    info_.struct_size = sizeof(info_);
    checkStatus("mhcCommGetInfo", mhcCommGetInfo(comm, &info_));
    if (!LaneUsers::instance().enter(comm, context)) {
        throw PluginError(
            "the communicator that was made from the environment has one lane, which another execution context of "
            "this process uses. Use one context at a time, or make the communicator before the contexts, with a lane "
            "for each: Communicator.from_environment(lanes=2, ...), and `with communicator.bound(lane=k):` around the "
            "creation of context k, alike on all ranks");
    }
    // Not counted: it stays until the process ends.
    context_ = context;
    comm_ = comm;
    lane_ = 0;
}

void CommunicatorBinding::require(GroupAttributes const& attributes, int64_t hidden) const {
    if (comm_ == nullptr) {
        throw PluginError(
            "no communicator for world ranks " + attributes.groupText() + " (" + mhcLastError() + otherVersions() +
            "). Create one on every rank (trtllm_mhc.runtime.Communicator), and make it current while the execution "
            "context is created (with communicator.bound(): ...) or have only one on this device; or start the ranks "
            "with a launcher's environment variables (docs/ranks.md). To run this rank alone on purpose, for warm-up: "
            "trtllm_mhc.plugin_control.warmup()");
    }
    if (attributes.rank >= 0 && info_.rank != attributes.rank) {
        throw PluginError(
            "the engine was built for rank " + std::to_string(attributes.rank) + ", but its communicator is rank " +
            std::to_string(info_.rank));
    }
    if (info_.hidden_size != hidden) {
        throw PluginError(
            "expected a communicator of hidden size " + std::to_string(hidden) + ", got one of " +
            std::to_string(info_.hidden_size));
    }
}

bool warmupMode() noexcept {
    return threadWarmup != 0;
}

void checkStatus(char const* function, mhcStatus status) {
    if (status != MHC_SUCCESS) {
        throw PluginError(std::string(function) + ": " + mhcStatusName(status) + ": " + mhcLastError());
    }
}

}  // namespace trtllm_mhc

int32_t mhcPluginSetWarmup(int32_t on) {
    int32_t const former = trtllm_mhc::threadWarmup;
    trtllm_mhc::threadWarmup = on != 0 ? 1 : 0;
    return former;
}
