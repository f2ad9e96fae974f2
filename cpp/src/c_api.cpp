// SPDX-License-Identifier: Apache-2.0
//
// The C functions: handles, which communicator a plugin uses, and the way from exceptions to status codes.
#include <algorithm>
#include <cstddef>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "communicator.h"
#include "environment.h"
#include "mhc/mhc.h"
#include "mhc/mxfp8_layout.h"
#include "status.h"

// What a handle points to. It outlives the communicator it was made for while a plugin still holds it.
struct mhcComm {
    std::shared_ptr<mhc::Communicator> communicator;
    int references = 1;
};

namespace mhc {
namespace {

thread_local std::string lastError;

struct Current {
    mhcComm* comm = nullptr;
    int lane = 0;
};
thread_local Current current;

// All handles of the process.
class Registry {
public:
    static Registry& instance() {
        static Registry* const registry = new Registry;  // never destroyed: plugins may outlive static destruction
        return *registry;
    }

    mhcComm* add(std::shared_ptr<Communicator> communicator) {
        mhcComm* const comm = addUnlisted(std::move(communicator));
        std::lock_guard<std::mutex> const lock(mutex_);
        open_.push_back(comm);
        return comm;
    }

    // One that plugins that look for a group do not find.
    mhcComm* addUnlisted(std::shared_ptr<Communicator> communicator) {
        auto* comm = new mhcComm{std::move(communicator)};
        std::lock_guard<std::mutex> const lock(mutex_);
        handles_.push_back(comm);
        return comm;
    }

    std::shared_ptr<Communicator> get(mhcComm* comm) {
        std::lock_guard<std::mutex> const lock(mutex_);
        requireKnown(comm);
        return comm->communicator;
    }

    void retain(mhcComm* comm) {
        std::lock_guard<std::mutex> const lock(mutex_);
        requireKnown(comm);
        ++comm->references;
    }

    void drop(mhcComm* comm) {
        std::shared_ptr<Communicator> last;
        std::lock_guard<std::mutex> const lock(mutex_);
        requireKnown(comm);
        if (--comm->references > 0)
            return;
        last = std::move(comm->communicator);
        handles_.erase(std::find(handles_.begin(), handles_.end(), comm));
        delete comm;
    }

    // No longer found by plugins that look for a group.
    std::shared_ptr<Communicator> withdraw(mhcComm* comm) {
        std::lock_guard<std::mutex> const lock(mutex_);
        requireKnown(comm);
        auto const at = std::find(open_.begin(), open_.end(), comm);
        require(at != open_.end(), "the communicator is already destroyed");
        open_.erase(at);
        return comm->communicator;
    }

    std::vector<mhcComm*> find(std::vector<int32_t> const& group, int device) {
        std::lock_guard<std::mutex> const lock(mutex_);
        std::vector<mhcComm*> found;
        for (mhcComm* comm : open_) {
            CommSettings const& s = comm->communicator->settings();
            if (s.group == group && s.device == device)
                found.push_back(comm);
        }
        return found;
    }

    bool isOpen(mhcComm* comm) {
        std::lock_guard<std::mutex> const lock(mutex_);
        return std::find(open_.begin(), open_.end(), comm) != open_.end();
    }

private:
    void requireKnown(mhcComm* comm) const {
        require(
            std::find(handles_.begin(), handles_.end(), comm) != handles_.end(),
            "not a communicator handle of this library: ", static_cast<void*>(comm));
    }

    std::mutex mutex_;
    std::vector<mhcComm*> handles_;
    std::vector<mhcComm*> open_;
};

mhcStatus create(
    mhcComm_t* comm, mhcCommConfig const* config,
    std::unique_ptr<Bootstrap> (*bootstrap)(CommSettings const&, void const*), void const* argument) {
    return guarded([&] {
        require(comm != nullptr, "comm is NULL");
        *comm = nullptr;
        CommSettings const settings = readConfig(config);
        *comm = Registry::instance().add(std::make_shared<Communicator>(settings, bootstrap(settings, argument)));
    });
}

struct Callback {
    mhcAllGatherFn function;
    void* context;
};

// A communicator made from the environment, or not yet.
struct EnvironmentSlot {
    std::mutex mutex;
    mhcComm* comm = nullptr;
};

EnvironmentSlot& environmentSlotOf(CommSettings const& s) {
    using Key = std::tuple<std::vector<int32_t>, int, int, int>;
    // Never destroyed, like the communicators in it: at the end of the process the peers may be gone.
    static auto* const slots = new std::map<Key, EnvironmentSlot>;
    static auto* const mutex = new std::mutex;
    std::lock_guard<std::mutex> const lock(*mutex);
    return (*slots)[Key{s.group, s.rank, s.device, s.hiddenSize}];
}

mhcComm* findEnvironment(EnvironmentGroup const& group, cudaStream_t stream) {
    EnvironmentSlot& slot = environmentSlotOf(group.settings);
    std::lock_guard<std::mutex> const lock(slot.mutex);
    if (slot.comm != nullptr)
        return slot.comm;
    cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
    checkCuda(cudaStreamIsCapturing(stream, &capturing), "cudaStreamIsCapturing");
    if (capturing != cudaStreamCaptureStatusNone) {
        fail(
            MHC_CAPTURE_NOT_READY, "the tensor-parallel group ", listOf(group.settings.group),
            " has not met yet, and cannot while a CUDA graph is captured: run every rank's engine once before "
            "capturing");
    }
    slot.comm = Registry::instance().addUnlisted(std::make_shared<Communicator>(group.settings, group.meet()));
    return slot.comm;
}

cudaStream_t streamOf(void* stream) {
    return static_cast<cudaStream_t>(stream);
}

}  // namespace

void setLastError(std::string const& sentence) noexcept {
    try {
        lastError = sentence;
    } catch (...) {
        lastError.clear();
    }
}

}  // namespace mhc

using mhc::guarded;
using mhc::Registry;
using mhc::require;

extern "C" {

char const* mhcVersion(void) {
    return MHC_VERSION;
}

char const* mhcLastError(void) {
    return mhc::lastError.c_str();
}

char const* mhcStatusName(mhcStatus status) {
    switch (status) {
        case MHC_SUCCESS:
            return "MHC_SUCCESS";
        case MHC_INVALID_ARGUMENT:
            return "MHC_INVALID_ARGUMENT";
        case MHC_CUDA_ERROR:
            return "MHC_CUDA_ERROR";
        case MHC_TIMEOUT:
            return "MHC_TIMEOUT";
        case MHC_MAILBOX_ERROR:
            return "MHC_MAILBOX_ERROR";
        case MHC_NOT_BOUND:
            return "MHC_NOT_BOUND";
        case MHC_UNSUPPORTED:
            return "MHC_UNSUPPORTED";
        case MHC_PEER_FAILED:
            return "MHC_PEER_FAILED";
        case MHC_CAPTURE_NOT_READY:
            return "MHC_CAPTURE_NOT_READY";
        case MHC_NCCL_ERROR:
            return "MHC_NCCL_ERROR";
    }
    return "unknown mhcStatus";
}

mhcStatus mhcCommCreateThreads(mhcComm_t* comm, mhcCommConfig const* config, char const* name) {
    if (name == nullptr || *name == '\0') {
        return guarded([] { mhc::fail(MHC_INVALID_ARGUMENT, "the group's name is empty: ranks meet by it"); });
    }
    return mhc::create(
        comm, config,
        [](mhc::CommSettings const& s, void const* argument) {
            return mhc::makeThreadBootstrap(static_cast<char const*>(argument), s.rank, s.tpSize, s.timeout);
        },
        name);
}

mhcStatus mhcCommCreateAllGather(
    mhcComm_t* comm, mhcCommConfig const* config, mhcAllGatherFn allGather, void* context) {
    if (allGather == nullptr)
        return guarded([] { mhc::fail(MHC_INVALID_ARGUMENT, "allGather is NULL"); });
    mhc::Callback const callback{allGather, context};
    return mhc::create(
        comm, config,
        [](mhc::CommSettings const&, void const* argument) {
            auto const& given = *static_cast<mhc::Callback const*>(argument);
            return mhc::makeCallbackBootstrap(given.function, given.context);
        },
        &callback);
}

mhcStatus mhcCommCreateSelfLoop(mhcComm_t* comm, mhcCommConfig const* config) {
    return mhc::create(
        comm, config, [](mhc::CommSettings const&, void const*) { return std::unique_ptr<mhc::Bootstrap>(); }, nullptr);
}

mhcStatus mhcCommCreateNccl(mhcComm_t* comm, mhcCommConfig const* config, void* ncclComm) {
    return mhc::create(
        comm, config,
        [](mhc::CommSettings const& s, void const* argument) {
            return mhc::makeNcclBootstrap(*static_cast<void* const*>(argument), s.rank, s.tpSize, s.device, s.timeout);
        },
        &ncclComm);
}

mhcStatus mhcNcclSetPath(char const* path) {
    return guarded([&] {
        require(path != nullptr, "path is NULL");
        mhc::NcclLibrary::setPath(path);
    });
}

mhcStatus mhcNcclVersion(int32_t* version) {
    return guarded([&] {
        require(version != nullptr, "version is NULL");
        *version = mhc::NcclLibrary::instance().version();
    });
}

mhcStatus mhcCommCreateEnvironment(mhcComm_t* comm, mhcCommConfig const* config) {
    return guarded([&] {
        require(comm != nullptr, "comm is NULL");
        *comm = nullptr;
        mhc::EnvironmentGroup const group = mhc::readEnvironmentGroup(config, mhc::environmentVariable);
        *comm = Registry::instance().add(std::make_shared<mhc::Communicator>(group.settings, group.meet()));
    });
}

mhcStatus mhcCommDestroy(mhcComm_t comm) {
    return guarded([&] {
        Registry::instance().withdraw(comm)->close();
        Registry::instance().drop(comm);
    });
}

mhcStatus mhcCommReset(mhcComm_t comm) {
    return guarded([&] { Registry::instance().get(comm)->reset(); });
}

mhcStatus mhcCommStatus(mhcComm_t comm, int32_t lane, mhcErrorRecord* record) {
    return guarded([&] {
        auto const communicator = Registry::instance().get(comm);
        int const lanes = communicator->settings().lanes;
        require(lane < lanes, "lane must be below ", lanes, ", got ", lane);
        communicator->pollNccl(lane);
        int const found = communicator->errorLane(lane);
        // A reset may have come in between.
        mhcErrorRecord const read = found < 0 ? mhcErrorRecord{} : communicator->record(found);
        if (record != nullptr)
            *record = read;
        if (read.kind != MHC_ERROR_NONE)
            mhc::fail(MHC_MAILBOX_ERROR, mhc::describe(read, found));
    });
}

mhcStatus mhcCommGetInfo(mhcComm_t comm, mhcCommInfo* info) {
    return guarded([&] {
        require(info != nullptr, "info is NULL");
        uint32_t const bytes = info->struct_size;
        require(
            bytes >= offsetof(mhcCommInfo, transport) && bytes <= sizeof(mhcCommInfo), "mhcCommInfo.struct_size is ",
            bytes, ", expected ", sizeof(mhcCommInfo), ": header and library differ");
        mhcCommInfo const complete = Registry::instance().get(comm)->info();
        std::memcpy(info, &complete, bytes);
        info->struct_size = bytes;
    });
}

mhcStatus mhcCommGetGroupInfo(mhcComm_t comm, mhcGroupInfo* info) {
    return guarded([&] {
        require(info != nullptr, "info is NULL");
        require(
            info->struct_size == sizeof(mhcGroupInfo), "mhcGroupInfo.struct_size is ", info->struct_size, ", expected ",
            sizeof(mhcGroupInfo), ": header and library differ");
        *info = Registry::instance().get(comm)->groupInfo();
    });
}

mhcStatus mhcCommSetCurrent(mhcComm_t comm, int32_t lane) {
    return guarded([&] {
        if (comm == nullptr) {
            mhc::current = {};
            return;
        }
        int const lanes = Registry::instance().get(comm)->settings().lanes;
        require(lane >= 0 && lane < lanes, "lane must be in 0 .. ", lanes - 1, ", got ", lane);
        mhc::current = {comm, lane};
    });
}

mhcStatus mhcCommFind(int32_t tpSize, int32_t const* group, int32_t groupSize, mhcComm_t* comm, int32_t* lane) {
    return guarded([&] {
        require(comm != nullptr && lane != nullptr, "comm or lane is NULL");
        *comm = nullptr;
        std::vector<int32_t> const ranks = mhc::groupRanks(tpSize, group, groupSize);
        if (mhc::current.comm != nullptr && Registry::instance().isOpen(mhc::current.comm) &&
            Registry::instance().get(mhc::current.comm)->settings().group == ranks) {
            *comm = mhc::current.comm;
            *lane = mhc::current.lane;
            return;
        }
        int device = 0;
        mhc::checkCuda(cudaGetDevice(&device), "cudaGetDevice");
        std::vector<mhcComm*> const found = Registry::instance().find(ranks, device);
        if (found.size() != 1) {
            mhc::fail(
                MHC_NOT_BOUND, found.empty() ? "no communicator" : "more than one communicator",
                " for the tensor-parallel group ", mhc::listOf(ranks), " on device ", device,
                ": make one and create the execution context inside `with communicator.bound():`");
        }
        *comm = found.front();
        *lane = 0;
    });
}

mhcStatus mhcCommFindEnvironment(mhcComm_t* comm, mhcCommConfig const* config, void* stream) {
    return guarded([&] {
        require(comm != nullptr, "comm is NULL");
        *comm = nullptr;
        mhc::requireEnvironmentGroup(mhc::environmentVariable);
        mhcCommConfig here = mhc::copyConfig(config);
        if (here.device < 0)
            mhc::checkCuda(cudaGetDevice(&here.device), "cudaGetDevice");
        mhc::EnvironmentGroup const group = mhc::readEnvironmentGroup(&here, mhc::environmentVariable);
        if (!Registry::instance().find(group.settings.group, group.settings.device).empty()) {
            mhc::fail(
                MHC_NOT_BOUND, "this process has made communicators for the tensor-parallel group ",
                mhc::listOf(group.settings.group),
                ": create the execution context inside `with communicator.bound():`");
        }
        *comm = mhc::findEnvironment(group, mhc::streamOf(stream));
    });
}

mhcStatus mhcCommRetain(mhcComm_t comm) {
    return guarded([&] { Registry::instance().retain(comm); });
}

mhcStatus mhcCommRelease(mhcComm_t comm) {
    return guarded([&] { Registry::instance().drop(comm); });
}

size_t mhcMxfp8ScaleBytes(int32_t rows, int32_t hidden) {
    if (rows <= 0 || hidden <= 0)
        return 0;
    return static_cast<size_t>(mhc::paddedScaleRows(rows)) * mhc::scaleColumns(hidden);
}

mhcStatus mhcBoundary(mhcComm_t comm, int32_t lane, mhcBoundaryArgs const* args, void* stream) {
    return guarded([&] {
        require(args != nullptr, "args is NULL");
        Registry::instance().get(comm)->boundary(lane, *args, mhc::streamOf(stream));
    });
}

mhcStatus mhcPublish(mhcComm_t comm, int32_t lane, void const* x, int32_t rows, void* stream) {
    return guarded([&] { Registry::instance().get(comm)->publish(lane, x, rows, mhc::streamOf(stream)); });
}

mhcStatus mhcCommPublishTarget(mhcComm_t comm, int32_t lane, mhcPublishTarget* target) {
    return guarded([&] {
        require(target != nullptr, "target is NULL");
        require(
            target->struct_size == sizeof(mhcPublishTarget), "mhcPublishTarget.struct_size is ", target->struct_size,
            ", expected ", sizeof(mhcPublishTarget), ": header and library differ");
        Registry::instance().get(comm)->publishTarget(lane, *target);
    });
}

mhcStatus mhcMarkPublished(mhcComm_t comm, int32_t lane, uint32_t owner, int32_t rows, void* stream) {
    return guarded([&] { Registry::instance().get(comm)->markPublished(lane, owner, rows, mhc::streamOf(stream)); });
}

mhcStatus mhcBoundaryLocal(int32_t hidden, mhcBoundaryArgs const* args, void* stream) {
    return guarded([&] {
        require(args != nullptr, "args is NULL");
        mhc::boundaryLocal(hidden, *args, mhc::streamOf(stream));
    });
}

mhcStatus mhcAllReduce(mhcComm_t comm, int32_t lane, void const* x, void* sum, int32_t rows, void* stream) {
    return guarded([&] { Registry::instance().get(comm)->allReduce(lane, x, sum, rows, mhc::streamOf(stream)); });
}

mhcStatus mhcAllReduceNccl(mhcComm_t comm, int32_t lane, void const* x, void* sum, int32_t rows, void* stream) {
    return guarded([&] { Registry::instance().get(comm)->allReduceNccl(lane, x, sum, rows, mhc::streamOf(stream)); });
}

mhcStatus mhcAllReduceLocal(void const* x, void* sum, int32_t rows, int32_t hidden, void* stream) {
    return guarded([&] { mhc::allReduceLocal(x, sum, rows, hidden, mhc::streamOf(stream)); });
}

mhcStatus mhcPublishLinear(mhcComm_t comm, int32_t lane, mhcPublishLinearArgs const* args, void* stream) {
    return guarded([&] {
        require(args != nullptr, "args is NULL");
        Registry::instance().get(comm)->publishLinear(lane, *args, mhc::streamOf(stream));
    });
}

mhcStatus mhcPublishLinearLocal(int32_t hidden, mhcPublishLinearArgs const* args, void* stream) {
    return guarded([&] {
        require(args != nullptr, "args is NULL");
        mhc::publishLinearLocal(hidden, *args, mhc::streamOf(stream));
    });
}

size_t mhcCoefficientsWorkspaceBytes(int32_t rows, int32_t hidden, int32_t broadcast) {
    return mhc::coefficientsWorkspaceBytes(rows, hidden, broadcast != 0);
}

mhcStatus mhcCoefficients(mhcCoefficientsArgs const* args, void* stream) {
    return guarded([&] {
        require(args != nullptr, "args is NULL");
        mhc::coefficients(*args, mhc::streamOf(stream));
    });
}

}  // extern "C"
