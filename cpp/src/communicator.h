// SPDX-License-Identifier: Apache-2.0
//
// One rank's membership in a tensor-parallel group: its mailboxes, the peers' as it reaches them, and its lanes.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <vector>

#include "bootstrap.h"
#include "kernels.h"
#include "mhc/mhc.h"
#include "nccl_path.h"
#include "peer_memory.h"

namespace mhc {

struct CommSettings {
    int tpSize;
    int rank;
    int device;
    int hiddenSize;
    int capacity;
    int lanes;
    mhcOnError onError;
    mhcWaitMode waitMode;
    std::chrono::milliseconds timeout;
    std::vector<int32_t> group;
    int ncclRows;  // 0: where there is no peer access, -1: never
    int ncclWorkspaceRows;
};

// Checks a configuration that comes from outside; throws with what was expected and what came.
CommSettings readConfig(mhcCommConfig const* config);
// What was given of it, the rest 0; throws where it is not of this library.
mhcCommConfig copyConfig(mhcCommConfig const* config);

// The world ranks that a (tpSize, group) pair names; an empty group is 0 .. tpSize-1.
std::vector<int32_t> groupRanks(int tpSize, int32_t const* group, int groupSize);
// "[0, 1]"
std::string listOf(std::vector<int32_t> const& ranks);

class Communicator {
public:
    // Collective. Without a bootstrap the rank plays its whole group.
    Communicator(CommSettings settings, std::unique_ptr<Bootstrap> bootstrap);
    ~Communicator();
    Communicator(Communicator const&) = delete;
    Communicator& operator=(Communicator const&) = delete;

    CommSettings const& settings() const { return settings_; }
    // The first lane in error, or -1. `lane` < 0 looks at all.
    int errorLane(int lane) const;
    // Makes what NCCL has reported of `lane` (< 0: all) the lane's error.
    void pollNccl(int lane) const;
    // Zeros once the communicator is closed.
    mhcErrorRecord record(int lane) const;
    void reset();
    // Frees the device memory. Collective where no lane is in error. Calls after it throw.
    void close();
    mhcCommInfo info() const;
    mhcGroupInfo groupInfo() const;

    void boundary(int lane, mhcBoundaryArgs const& args, cudaStream_t stream);
    void publish(int lane, void const* x, int rows, cudaStream_t stream);
    void publishTarget(int lane, mhcPublishTarget& target) const;
    void markPublished(int lane, uint32_t owner, int rows, cudaStream_t stream);
    void publishLinear(int lane, mhcPublishLinearArgs const& args, cudaStream_t stream);
    void allReduce(int lane, void const* x, void* sum, int rows, cudaStream_t stream);
    void allReduceNccl(int lane, void const* x, void* sum, int rows, cudaStream_t stream);

private:
    class Setup;
    void quiesce();
    void barrier();
    void fill();
    void release() noexcept;
    // What the group decided.
    std::string sentence() const;
    void checkUsable(int lane) const;
    int producerRows() const;
    void launchPublishOf(Mailbox const& box, BoundaryArgs const& args, Chunk const& chunk, cudaStream_t stream) const;

    bool viaNccl(int rows) const { return ncclRows_ > 0 && rows >= ncclRows_; }
    void boundaryNccl(int lane, mhcBoundaryArgs const& args, cudaStream_t stream);
    void exchange(int lane, int rows, Published published, Consumer consumer, BoundaryArgs args, cudaStream_t stream);

    CommSettings settings_;
    std::unique_ptr<Bootstrap> bootstrap_;
    std::byte* mailbox_ = nullptr;       // slots and headers of all lanes
    std::byte* states_ = nullptr;        // device: each lane's and its rows' state
    mhcErrorRecord* records_ = nullptr;  // host, pinned, one a lane
    std::vector<void*> openedHandles_;   // CUDA IPC mappings of peers
    std::vector<Mailbox> boxes_;         // as kernels take them, one a lane
    size_t mailboxBytes_ = 0;
    std::vector<RankLocation> locations_;  // by rank
    std::vector<ReachRow> reach_;          // from each rank
    std::string multicastReason_;          // why it is not used
    int ranksPerDevice_ = 1;
    bool waitsAtGate_ = false;
    int exchangeRows_ = 0;  // up to which one kernel publishes and consumes
    mhcTransport transport_ = MHC_TRANSPORT_MAILBOX;
    std::string transportReason_;
    int ncclRows_ = 0;  // M from which on NCCL is used, 0 = never
    std::unique_ptr<NcclPath> nccl_;
    std::atomic<bool> closed_{false};
    // Shared by whoever uses the memory, alone for freeing it: plugins may still be at work when a communicator is
    // closed.
    mutable std::shared_mutex memory_;
};

// This rank's contribution alone, without a mailbox.
void boundaryLocal(int hidden, mhcBoundaryArgs const& args, cudaStream_t stream);
void allReduceLocal(void const* x, void* sum, int rows, int hidden, cudaStream_t stream);

void publishLinearLocal(int hidden, mhcPublishLinearArgs const& args, cudaStream_t stream);

size_t coefficientsWorkspaceBytes(int rows, int hidden, bool broadcast);
void coefficients(mhcCoefficientsArgs const& args, cudaStream_t stream);

// The sentence for an error record.
std::string describe(mhcErrorRecord const& record, int lane);

}  // namespace mhc
