// SPDX-License-Identifier: Apache-2.0
#include "nccl_path.h"

#include <algorithm>
#include <cstring>
#include <future>

#include "agreement.h"
#include "device_guard.h"
#include "status.h"

namespace mhc {
namespace {

using Clock = std::chrono::steady_clock;

constexpr unsigned kConfigMagic = 0xcafebeef;
constexpr unsigned kConfigVersion = 21400;

// NCCL waits in an abort for the graphs that hold its kernels. Nobody waits for that longer than this.
constexpr std::chrono::seconds kLongestAbort{2};

struct Invitation {
    int32_t failed;
    char reason[252];
    int32_t version;
    NcclUniqueId id;  // rank 0's counts
};

}  // namespace

NcclPath::NcclPath(Settings const& settings, Bootstrap& bootstrap, mhcErrorRecord* records)
    : settings_(settings), nccl_(NcclLibrary::instance()), records_(records), lanes_(settings.lanes) {
    try {
        connect(bootstrap);
    } catch (...) {
        release();
        throw;
    }
    watching_ = true;
    watcher_ = std::thread([this] { watch(); });
}

NcclPath::~NcclPath() {
    {
        std::lock_guard<std::mutex> const lock(watchMutex_);
        watching_ = false;
    }
    stopWatching_.notify_all();
    if (watcher_.joinable())
        watcher_.join();
    release();
}

size_t NcclPath::bytes() const {
    return size_t{2} * settings_.rows * settings_.hiddenSize * settings_.lanes;
}

void NcclPath::allocate() {
    for (Lane& lane : lanes_) {
        size_t const bytes = size_t{2} * settings_.rows * settings_.hiddenSize;
        checkCuda(
            cudaMalloc(reinterpret_cast<void**>(&lane.workspace), bytes), "cudaMalloc of ", bytes,
            " bytes for the workspace of NCCL's all-reduce");
        checkCuda(
            cudaMalloc(reinterpret_cast<void**>(&lane.progress), sizeof(NcclProgress)),
            "cudaMalloc of the state of NCCL's all-reduce");
        checkCuda(cudaMemset(lane.workspace, 0, bytes), "clearing the workspace of NCCL's all-reduce");
        checkCuda(
            cudaHostAlloc(
                reinterpret_cast<void**>(&lane.beat), sizeof(NcclBeat), cudaHostAllocPortable | cudaHostAllocMapped),
            "cudaHostAlloc of the state of NCCL's all-reduce");
        std::memset(lane.beat, 0, sizeof(NcclBeat));
        void* onDevice = nullptr;
        checkCuda(cudaHostGetDevicePointer(&onDevice, lane.beat, 0), "cudaHostGetDevicePointer");
        lane.beatOnDevice = static_cast<NcclBeat*>(onDevice);
    }
}

void NcclPath::connect(Bootstrap& bootstrap) {
    Verdict mine{};
    try {
        if (lanes_.front().workspace == nullptr)
            allocate();
        for (Lane& lane : lanes_) {
            NcclProgress const start{0, 0, lane.epoch + 1};
            checkCuda(
                cudaMemcpy(lane.progress, &start, sizeof(start), cudaMemcpyHostToDevice),
                "setting the state of NCCL's all-reduce");
        }
    } catch (std::exception const& error) {
        mine.failed = 1;
        setReason(mine.reason, error.what());
    }
    requireAll(bootstrap.gather(mine, settings_.ranks), "allocating for NCCL");
    for (int lane = 0; lane < settings_.lanes; ++lane)
        connectLane(bootstrap, lane);
}

void NcclPath::connectLane(Bootstrap& bootstrap, int index) {
    Lane& lane = lanes_[static_cast<size_t>(index)];
    std::lock_guard<std::mutex> const lock(lane.mutex);
    Invitation mine{};
    try {
        mine.version = nccl_.version();
        if (settings_.rank == 0)
            nccl_.check(nccl_.getUniqueId(&mine.id), nullptr, "ncclGetUniqueId");
    } catch (std::exception const& error) {
        mine.failed = 1;
        setReason(mine.reason, error.what());
    }
    std::vector<Invitation> const all = bootstrap.gather(mine, settings_.ranks);
    requireAll(all, "inviting to an NCCL communicator");
    for (size_t r = 0; r < all.size(); ++r) {
        require(
            all[r].version == mine.version, "rank ", r, " has NCCL ", NcclLibrary::versionText(all[r].version),
            ", rank ", settings_.rank, " has ", NcclLibrary::versionText(mine.version),
            ": all ranks of a group need the same");
    }
    Verdict verdict{};
    try {
        // Half the time-out: a rank that fails at once waits for the others' verdict the whole of it.
        auto const deadline = Clock::now() + settings_.timeout / 2;
        NcclConfig config{sizeof(NcclConfig), kConfigMagic, kConfigVersion, 0};
        int const result =
            nccl_.commInitRankConfig(&lane.comm, settings_.ranks, all.front().id, settings_.rank, &config);
        nccl_.await(result, lane.comm, deadline, "ncclCommInitRankConfig");
        lane.epoch += 1;
        lane.finished = 0;
        std::memset(lane.beat, 0, sizeof(NcclBeat));
        warmUp(lane);
    } catch (std::exception const& error) {
        abort(lane);
        verdict.failed = 1;
        setReason(verdict.reason, error.what());
    }
    requireAll(bootstrap.gather(verdict, settings_.ranks), "making an NCCL communicator");
}

// NCCL connects to its peers, and allocates, on the first all-reduce of a kind; which kind depends on the size. Do that
// now, not in an enqueue.
void NcclPath::warmUp(Lane& lane) {
    auto const deadline = Clock::now() + settings_.timeout / 2;
    cudaStream_t stream = nullptr;
    checkCuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "making a stream for NCCL");
    try {
        for (int rows = settings_.rows; rows > 0; rows /= 2) {
            size_t const count = size_t(rows) * settings_.hiddenSize;
            nccl_.await(
                nccl_.allReduce(lane.workspace, lane.workspace, count, kNcclBfloat16, kNcclSum, lane.comm, stream),
                lane.comm, deadline, "the first ncclAllReduce");
        }
        cudaError_t status = cudaErrorNotReady;
        while ((status = cudaStreamQuery(stream)) == cudaErrorNotReady) {
            int result = kNcclSuccess;
            nccl_.check(nccl_.commGetAsyncError(lane.comm, &result), lane.comm, "the first ncclAllReduce");
            if (result != kNcclInProgress)
                nccl_.check(result, lane.comm, "the first ncclAllReduce");
            if (Clock::now() > deadline)
                fail(MHC_TIMEOUT, "the first ncclAllReduce did not finish in time");
            std::this_thread::sleep_for(std::chrono::microseconds(50));
        }
        checkCuda(status, "the first ncclAllReduce");
    } catch (...) {
        abort(lane);
        cudaStreamDestroy(stream);
        throw;
    }
    cudaStreamDestroy(stream);
}

void NcclPath::sum(
    Mailbox const& box, uint4 const* x, uint4* sum, FinalizeInput const& finalize, Chunk const& chunk,
    cudaStream_t stream) {
    Lane& lane = lanes_[static_cast<size_t>(box.lane)];
    size_t const fragments = size_t(chunk.rows) * (settings_.hiddenSize / kFragment);
    std::unique_lock<std::mutex> lock(lane.mutex);
    if (lane.comm == nullptr)
        fail(MHC_NCCL_ERROR, "the NCCL communicator of lane ", box.lane, " was given up: all ranks must reset");
    uint32_t const epoch = lane.epoch;
    checkCuda(
        launchNcclBegin(box, lane.progress, lane.beatOnDevice, finalize, chunk, stream),
        "launching what precedes NCCL");
    try {
        int const result = nccl_.allReduce(x, sum, fragments * kFragment, kNcclBfloat16, kNcclSum, lane.comm, stream);
        nccl_.await(result, lane.comm, Clock::now() + settings_.timeout, "ncclAllReduce");
    } catch (Failure const& failure) {
        lock.unlock();
        stop(box.lane, failure.status() == MHC_TIMEOUT ? 0 : 1, 0);
        throw;
    }
    checkCuda(
        launchNcclEnd(box, lane.progress, lane.beatOnDevice, epoch, sum, fragments, chunk.owner, stream),
        "launching what follows NCCL");
}

void NcclPath::poll(int lane) {
    int const first = lane < 0 ? 0 : lane;
    int const last = lane < 0 ? settings_.lanes - 1 : lane;
    for (int i = first; i <= last; ++i) {
        int result = kNcclSuccess;
        {
            Lane& at = lanes_[static_cast<size_t>(i)];
            std::unique_lock<std::mutex> const lock(at.mutex, std::try_to_lock);
            if (!lock.owns_lock() || at.comm == nullptr)
                continue;
            int const asked = nccl_.commGetAsyncError(at.comm, &result);
            if (asked != kNcclSuccess)
                result = asked;
        }
        if (result != kNcclSuccess && result != kNcclInProgress)
            stop(i, 1, static_cast<uint32_t>(result));
    }
}

void NcclPath::watch() {
    cudaSetDevice(settings_.device);
    auto const period = std::clamp<std::chrono::milliseconds>(
        settings_.timeout / 20, std::chrono::milliseconds(1), std::chrono::milliseconds(100));
    std::unique_lock<std::mutex> lock(watchMutex_);
    while (!stopWatching_.wait_for(lock, period, [this] { return !watching_; })) {
        for (int lane = 0; lane < settings_.lanes; ++lane)
            look(lane);
        poll(-1);
    }
}

void NcclPath::look(int index) {
    Lane& lane = lanes_[static_cast<size_t>(index)];
    {
        std::unique_lock<std::mutex> const free(lane.mutex, std::try_to_lock);
        // Somebody who waits for NCCL with the lane in hands has a deadline too.
        if (!free.owns_lock() || lane.comm == nullptr)
            return;
        uint32_t const finished = __atomic_load_n(&lane.beat->finished, __ATOMIC_ACQUIRE);
        uint32_t const started = __atomic_load_n(&lane.beat->started, __ATOMIC_ACQUIRE);
        auto const now = Clock::now();
        if (started == finished || finished != lane.finished || lane.since == NcclDeadline{}) {
            lane.finished = finished;
            lane.since = started == finished ? NcclDeadline{} : now;
            return;
        }
        if (now - lane.since < settings_.timeout)
            return;
    }
    stop(index, 0, 0);
}

// Writes the record first: NCCL's kernels end with the abort, and what follows them must find it.
void NcclPath::stop(int index, uint32_t field, uint32_t result) {
    mhcErrorRecord& record = records_[index];
    if (__atomic_load_n(&record.kind, __ATOMIC_ACQUIRE) == MHC_ERROR_NONE) {
        record.rank = -1;
        record.token = -1;
        record.generation = 0;
        record.sequence = 0;
        record.expected = 0;
        record.got = result;
        record.field = field;
        __atomic_store_n(&record.kind, static_cast<uint32_t>(MHC_ERROR_NCCL), __ATOMIC_RELEASE);
    }
    Lane& lane = lanes_[static_cast<size_t>(index)];
    std::lock_guard<std::mutex> const lock(lane.mutex);
    abort(lane);
}

// With the lane in hands. The communicator is never used again, whether or not NCCL is done with it in time.
void NcclPath::abort(Lane& lane) noexcept {
    if (lane.comm == nullptr)
        return;
    ncclComm* const comm = lane.comm;
    lane.comm = nullptr;
    try {
        auto const done = std::make_shared<std::promise<void>>();
        std::future<void> const ended = done->get_future();
        std::thread([abort = nccl_.commAbort, comm, done] {
            abort(comm);
            done->set_value();
        }).detach();
        ended.wait_for(kLongestAbort);
    } catch (std::exception const&) {
        // No thread to be had: better to leave the communicator than to wait in NCCL without end.
    }
}

void NcclPath::reset(Bootstrap& bootstrap) {
    Verdict mine{};
    for (Lane& lane : lanes_) {
        std::lock_guard<std::mutex> const lock(lane.mutex);
        mine.failed = mine.failed || lane.comm == nullptr ? 1 : 0;
    }
    std::vector<Verdict> const all = bootstrap.gather(mine, settings_.ranks);
    if (std::none_of(all.begin(), all.end(), [](Verdict const& verdict) { return verdict.failed != 0; }))
        return;
    for (Lane& lane : lanes_) {
        std::lock_guard<std::mutex> const lock(lane.mutex);
        abort(lane);
    }
    connect(bootstrap);
}

void NcclPath::release() noexcept {
    for (Lane& lane : lanes_) {
        {
            std::lock_guard<std::mutex> const lock(lane.mutex);
            abort(lane);
        }
        cudaFree(lane.workspace);
        cudaFree(lane.progress);
        cudaFreeHost(lane.beat);
        lane.workspace = nullptr;
        lane.progress = nullptr;
        lane.beat = nullptr;
    }
    cudaGetLastError();
}

}  // namespace mhc
