// SPDX-License-Identifier: Apache-2.0
//
// Ranks that meet through an ncclComm_t that somebody else has made.
#include <algorithm>
#include <cstring>
#include <thread>

#include "bootstrap.h"
#include "device_guard.h"
#include "nccl_library.h"
#include "status.h"

namespace mhc {
namespace {

// What goes through ncclAllGather: always as much, so that ranks that exchange different things find out.
struct Piece {
    uint64_t bytes;  // of the whole message
    uint64_t begin;
    char payload[4096 - 16];
};

class NcclBootstrap : public Bootstrap {
public:
    NcclBootstrap(ncclComm* comm, int rank, int ranks, int device, std::chrono::milliseconds timeout)
        : nccl_(NcclLibrary::instance()), comm_(comm), ranks_(ranks), device_(device), timeout_(timeout) {
        require(comm != nullptr, "the NCCL communicator is NULL");
        requireSame(nccl_.commCount, ranks, "ranks", "tp_size");
        requireSame(nccl_.commUserRank, rank, "the rank", "rank");
        requireSame(nccl_.commCuDevice, device, "the device", "device");
        DeviceGuard const guard(device);
        try {
            checkCuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "making a stream for NCCL");
            checkCuda(
                cudaMalloc(reinterpret_cast<void**>(&onDevice_), sizeof(Piece) * (ranks + 1)),
                "cudaMalloc of the messages that go through NCCL");
            checkCuda(
                cudaHostAlloc(reinterpret_cast<void**>(&onHost_), sizeof(Piece) * (ranks + 1), cudaHostAllocPortable),
                "cudaHostAlloc of the messages that go through NCCL");
        } catch (...) {
            release();
            throw;
        }
    }

    ~NcclBootstrap() override { release(); }

    void allGather(void const* send, void* receive, size_t bytes) override {
        require(!broken_, "the NCCL communicator that the ranks met through has failed before");
        DeviceGuard const guard(device_);
        size_t begin = 0;
        do {
            size_t const size = std::min(bytes - begin, sizeof(Piece::payload));
            Piece& mine = onHost_[ranks_];
            mine = {bytes, begin, {}};
            std::memcpy(mine.payload, static_cast<char const*>(send) + begin, size);
            broken_ = true;  // until it has gone well
            exchange();
            broken_ = false;
            for (int r = 0; r < ranks_; ++r) {
                Piece const& theirs = onHost_[r];
                if (theirs.bytes != bytes || theirs.begin != begin) {
                    fail(
                        MHC_PEER_FAILED, "rank ", r, " exchanges ", theirs.bytes, " bytes from ", theirs.begin,
                        " where this rank exchanges ", bytes, " from ", begin, ": the ranks are not in the same call");
                }
                std::memcpy(static_cast<char*>(receive) + bytes * static_cast<size_t>(r) + begin, theirs.payload, size);
            }
            begin += size;
        } while (begin < bytes);
    }

private:
    void requireSame(int (*ask)(ncclComm*, int*), int expected, char const* what, char const* field) const {
        int got = -1;
        nccl_.check(ask(comm_, &got), comm_, "asking the NCCL communicator for ", what);
        require(
            got == expected, "the NCCL communicator has ", what, " ", got, ", the configuration has ", field, " = ",
            expected);
    }

    void exchange() {
        auto const deadline = std::chrono::steady_clock::now() + timeout_;
        Piece* const mine = onDevice_ + ranks_;
        checkCuda(
            cudaMemcpyAsync(mine, onHost_ + ranks_, sizeof(Piece), cudaMemcpyHostToDevice, stream_),
            "copying a message for NCCL");
        nccl_.await(
            nccl_.allGather(mine, onDevice_, sizeof(Piece), kNcclUint8, comm_, stream_), comm_, deadline,
            "ncclAllGather");
        checkCuda(
            cudaMemcpyAsync(onHost_, onDevice_, sizeof(Piece) * ranks_, cudaMemcpyDeviceToHost, stream_),
            "copying messages from NCCL");
        while (true) {
            cudaError_t const status = cudaStreamQuery(stream_);
            if (status == cudaSuccess)
                return;
            if (status != cudaErrorNotReady)
                checkCuda(status, "ncclAllGather");
            int result = kNcclSuccess;
            nccl_.check(nccl_.commGetAsyncError(comm_, &result), comm_, "ncclAllGather");
            if (result != kNcclInProgress)
                nccl_.check(result, comm_, "ncclAllGather");
            if (std::chrono::steady_clock::now() > deadline) {
                fail(
                    MHC_TIMEOUT, "the other ranks of the NCCL communicator did not come within ", timeout_.count(),
                    " ms");
            }
            std::this_thread::sleep_for(std::chrono::microseconds(50));
        }
    }

    void release() noexcept {
        // NCCL's kernel may still be waiting for a peer there, for ever: the communicator is not ours to abort. Freeing
        // would wait for it.
        if (broken_)
            return;
        int before = 0;
        cudaGetDevice(&before);
        cudaSetDevice(device_);
        cudaFree(onDevice_);
        cudaFreeHost(onHost_);
        if (stream_ != nullptr)
            cudaStreamDestroy(stream_);
        cudaSetDevice(before);
        cudaGetLastError();
    }

    NcclLibrary const& nccl_;
    ncclComm* comm_;
    int ranks_;
    int device_;
    std::chrono::milliseconds timeout_;
    cudaStream_t stream_ = nullptr;
    Piece* onDevice_ = nullptr;  // all ranks', then this one's own
    Piece* onHost_ = nullptr;    // likewise
    bool broken_ = false;
};

}  // namespace

std::unique_ptr<Bootstrap> makeNcclBootstrap(
    void* comm, int rank, int ranks, int device, std::chrono::milliseconds timeout) {
    return std::make_unique<NcclBootstrap>(static_cast<ncclComm*>(comm), rank, ranks, device, timeout);
}

}  // namespace mhc
