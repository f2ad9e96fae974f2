// SPDX-License-Identifier: Apache-2.0
//
// The way round the mailbox: NCCL's all-reduce into a workspace, then the boundary kernel on the sum. For ranks without
// peer access to each other, and for M so large that bandwidth counts.
//
// Every lane has an NCCL communicator and a workspace of its own, so that lanes may run at once in any order; a lane's
// users are totally ordered, which is what NCCL asks of the users of a communicator. Communicators do not block the
// host: every wait for NCCL has a deadline.
//
// NCCL's kernels wait for their peers for ever. So a kernel before the all-reduce counts it as started, one after it as
// finished, and a thread of the host aborts the lane's communicator when nothing has finished for the time-out, or NCCL
// reports an error: its kernels then end, and the kernel after them finds the lane's record and writes NaN. The counts
// are made on the device, so replays of graphs are watched like everything else.
//
// A lane whose communicator was aborted gets a new one in the collective reset. Graphs captured before it would use the
// old one: the kernel after the all-reduce knows the epoch it was launched in, and makes another an error.
#pragma once

#include <cuda_runtime_api.h>

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "bootstrap.h"
#include "kernels.h"
#include "nccl_library.h"

namespace mhc {

class NcclPath {
public:
    struct Settings {
        int rank;
        int ranks;
        int device;
        int hiddenSize;
        int lanes;
        int rows;  // of the workspace
        std::chrono::milliseconds timeout;
    };

    // Collective, on the current device. `records` are the lanes' error records in host memory.
    NcclPath(Settings const& settings, Bootstrap& bootstrap, mhcErrorRecord* records);
    ~NcclPath();
    NcclPath(NcclPath const&) = delete;
    NcclPath& operator=(NcclPath const&) = delete;

    int version() const { return nccl_.version(); }
    int rows() const { return settings_.rows; }
    size_t bytes() const;
    // [rows, H]
    uint4* workspace(int lane) const { return lanes_[static_cast<size_t>(lane)].workspace; }

    // sum = the ranks' sum of x, at most rows() rows where `sum` is the workspace; x and sum may be the same. Throws
    // Failure(MHC_NCCL_ERROR). `finalize` (topK 0: none) has its indices checked on the way.
    void sum(
        Mailbox const& box, uint4 const* x, uint4* sum, FinalizeInput const& finalize, Chunk const& chunk,
        cudaStream_t stream);

    // Writes the lane's record when NCCL has reported an error.
    void poll(int lane);
    // Collective: new communicators where one of the ranks has lost one. Nothing may be in flight.
    void reset(Bootstrap& bootstrap);

private:
    struct Lane {
        std::mutex mutex;  // whoever uses or aborts the communicator
        ncclComm* comm = nullptr;
        uint32_t epoch = 0;
        uint4* workspace = nullptr;
        NcclProgress* progress = nullptr;  // in device memory
        NcclBeat* beat = nullptr;          // in host memory
        NcclBeat* beatOnDevice = nullptr;  // the same, as kernels reach it
        // What the watching thread has seen last, and when.
        uint32_t finished = 0;
        NcclDeadline since{};
    };

    void allocate();
    void connect(Bootstrap& bootstrap);
    void connectLane(Bootstrap& bootstrap, int index);
    void warmUp(Lane& lane);
    void watch();
    void look(int index);
    void stop(int index, uint32_t field, uint32_t result);
    void abort(Lane& lane) noexcept;
    void release() noexcept;

    Settings const settings_;
    NcclLibrary const& nccl_;
    mhcErrorRecord* const records_;
    std::deque<Lane> lanes_;  // Lane does not move
    std::mutex watchMutex_;
    std::condition_variable stopWatching_;
    bool watching_ = false;
    std::thread watcher_;
};

}  // namespace mhc
