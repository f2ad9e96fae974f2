// SPDX-License-Identifier: Apache-2.0
#include "communicator.h"

#include <cuda_runtime_api.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <random>
#include <utility>

#include "status.h"

namespace mhc {
namespace {

constexpr int kMaxLanes = 64;
constexpr int kMaxCapacity = 65535;  // rows of a launch are its grid's y dimension
constexpr size_t kHeaderBytes = 16;

size_t alignUp(size_t bytes, size_t to) {
    return (bytes + to - 1) / to * to;
}

size_t slotBytesPerLane(CommSettings const& s) {
    return size_t{kGenerations} * s.tpSize * s.capacity * s.hiddenSize * 2;
}

size_t bytesPerLane(CommSettings const& s) {
    return alignUp(slotBytesPerLane(s) + size_t{kGenerations} * s.tpSize * s.capacity * kHeaderBytes, 256);
}

// A lane's state: the lane's own, then its rows'.
size_t stateBytesPerLane(CommSettings const& s) {
    return sizeof(LaneState) + sizeof(RowState) * s.capacity;
}

// Tells processes apart, where process ids cannot (containers).
std::array<uint64_t, 2> processIdentity() {
    static std::array<uint64_t, 2> const identity = [] {
        std::random_device random;
        auto const word = [&] { return (uint64_t{random()} << 32) | random(); };
        return std::array<uint64_t, 2>{word(), word() ^ static_cast<uint64_t>(getpid())};
    }();
    return identity;
}

// What the ranks tell each other first. Trivially copyable, and without padding that could differ.
struct Introduction {
    int32_t magic;
    int32_t tpSize, rank, hiddenSize, capacity, lanes, onError, waitMode, timeoutMs, device;
    int32_t groupSize;
    int32_t group[MHC_MAX_GROUP];
    uint64_t process[2];
    char deviceUuid[16];
};
constexpr int32_t kMagic = 0x4D484331;

struct Offer {
    int32_t failed;
    char reason[252];
    void* address;
    cudaIpcMemHandle_t handle;
    int32_t hasHandle;
    int32_t residentRows;  // of a kernel that exchanges
};

struct Verdict {
    int32_t failed;
    char reason[252];
};

void setReason(char (&reason)[252], std::string const& text) {
    std::snprintf(reason, sizeof(reason), "%s", text.c_str());
}

template <typename Answer>
void requireAll(std::vector<Answer> const& answers, char const* step) {
    for (size_t r = 0; r < answers.size(); ++r) {
        if (answers[r].failed)
            fail(MHC_PEER_FAILED, step, " failed on rank ", r, ": ", answers[r].reason);
    }
}

// Restores the calling thread's device.
class DeviceGuard {
public:
    explicit DeviceGuard(int device) {
        checkCuda(cudaGetDevice(&before_), "cudaGetDevice");
        if (before_ != device)
            checkCuda(cudaSetDevice(device), "cudaSetDevice(", device, ")");
    }
    ~DeviceGuard() { cudaSetDevice(before_); }
    DeviceGuard(DeviceGuard const&) = delete;
    DeviceGuard& operator=(DeviceGuard const&) = delete;

private:
    int before_ = 0;
};

void enablePeerAccess(int from, int to) {
    if (from == to)
        return;
    int can = 0;
    checkCuda(cudaDeviceCanAccessPeer(&can, from, to), "cudaDeviceCanAccessPeer(", from, ", ", to, ")");
    if (can == 0) {
        fail(
            MHC_UNSUPPORTED, "device ", from, " cannot access the memory of device ", to,
            ": the mailbox needs peer access (NVLink, or PCIe with P2P enabled)");
    }
    cudaError_t const status = cudaDeviceEnablePeerAccess(to, 0);
    if (status == cudaErrorPeerAccessAlreadyEnabled) {
        cudaGetLastError();
        return;
    }
    checkCuda(status, "cudaDeviceEnablePeerAccess from device ", from, " to ", to);
}

void requireAligned(void const* pointer, char const* name) {
    require(pointer != nullptr, name, " is NULL");
    require(reinterpret_cast<uintptr_t>(pointer) % 16 == 0, name, " is not 16-byte aligned: ", pointer);
}

void checkBoundaryArgs(mhcBoundaryArgs const& args) {
    require(
        args.struct_size == sizeof(mhcBoundaryArgs), "mhcBoundaryArgs.struct_size is ", args.struct_size, ", expected ",
        sizeof(mhcBoundaryArgs), ": header and library differ");
    require(args.rows >= 0, "rows must not be negative, got ", args.rows);
    if (args.rows == 0)
        return;
    require(args.top_k >= 0, "top_k must not be negative, got ", args.top_k);
    requireAligned(args.residual, "residual");
    requireAligned(args.post, "post");
    requireAligned(args.comb, "comb");
    requireAligned(args.residual_out, "residual_out");
    require(args.residual != args.residual_out, "residual_out must be another tensor than residual");
    bool const collapses = args.pre != nullptr;
    require(
        collapses == (args.gamma != nullptr) && collapses == (args.layer_input != nullptr),
        "pre, gamma and layer_input are given together, or none of them for a residual-only boundary");
    if (collapses) {
        requireAligned(args.pre, "pre");
        requireAligned(args.gamma, "gamma");
        requireAligned(args.layer_input, "layer_input");
        require(args.norm_eps >= 0.0F, "norm_eps must be a number >= 0, got ", args.norm_eps);
    }
    require(
        (args.mxfp8_data != nullptr) == (args.mxfp8_scales != nullptr),
        "mxfp8_data and mxfp8_scales are given together");
    if (args.mxfp8_data != nullptr) {
        require(collapses, "MXFP8 output needs a layer input: pre, gamma and layer_input are NULL");
        requireAligned(args.mxfp8_data, "mxfp8_data");
        requireAligned(args.mxfp8_scales, "mxfp8_scales");
    }
    if (args.top_k > 0) {
        require(
            args.published == 0,
            "a published contribution cannot be finalized: published = 1 with top_k = ", args.top_k);
        requireAligned(args.gemm2_permuted, "gemm2_permuted");
        requireAligned(args.shared_output, "shared_output");
        require(args.expert_weights != nullptr, "expert_weights is NULL");
        require(args.expanded_idx_to_permuted_idx != nullptr, "expanded_idx_to_permuted_idx is NULL");
        require(args.permuted_rows >= 0, "permuted_rows must not be negative, got ", args.permuted_rows);
    } else if (args.published == 0) {
        requireAligned(args.x, "x");
    }
}

Consumer consumerOf(mhcBoundaryArgs const& args) {
    return args.pre != nullptr ? Consumer::kBoundary : Consumer::kResidualOnly;
}

FinalizeInput finalizeInput(mhcBoundaryArgs const& args) {
    return {static_cast<uint4 const*>(args.gemm2_permuted), args.expert_weights, args.expanded_idx_to_permuted_idx,
            static_cast<uint4 const*>(args.shared_output),  args.top_k,          args.permuted_rows};
}

BoundaryArgs kernelArgs(mhcBoundaryArgs const& args) {
    BoundaryArgs out{};
    out.x = static_cast<uint4 const*>(args.x);
    if (args.top_k > 0)
        out.finalize = finalizeInput(args);
    out.residual = static_cast<uint4 const*>(args.residual);
    out.post = args.post;
    out.comb = args.comb;
    out.pre = args.pre;
    out.gamma = static_cast<uint4 const*>(args.gamma);
    out.eps = args.norm_eps;
    out.residualOut = static_cast<uint4*>(args.residual_out);
    out.layerInput = static_cast<uint4*>(args.layer_input);
    out.quantised = static_cast<uint2*>(args.mxfp8_data);
    out.scales = static_cast<uint8_t*>(args.mxfp8_scales);
    return out;
}

// A number for one enqueue (or one captured node), so that the device can tell two users of a lane apart.
uint32_t nextOwner() {
    static std::atomic<uint32_t> counter{0};
    uint32_t owner = ++counter;
    while (owner == 0)
        owner = ++counter;
    return owner;
}

char const* const kHeaderFields[] = {"call number", "rows (M)", "operation", "lane"};

}  // namespace

std::vector<int32_t> groupRanks(int tpSize, int32_t const* group, int groupSize) {
    std::vector<int32_t> ranks;
    if (groupSize == 0) {
        for (int r = 0; r < tpSize; ++r)
            ranks.push_back(r);
        return ranks;
    }
    require(group != nullptr, "group is NULL but has ", groupSize, " entries");
    require(groupSize == tpSize, "group has ", groupSize, " ranks, expected tp_size = ", tpSize);
    ranks.assign(group, group + groupSize);
    for (size_t i = 0; i < ranks.size(); ++i) {
        require(ranks[i] >= 0, "group holds the rank ", ranks[i], ", expected ranks >= 0");
        require(
            std::find(ranks.begin(), ranks.begin() + static_cast<std::ptrdiff_t>(i), ranks[i]) ==
                ranks.begin() + static_cast<std::ptrdiff_t>(i),
            "group holds the rank ", ranks[i], " twice");
    }
    return ranks;
}

CommSettings readConfig(mhcCommConfig const* config) {
    require(config != nullptr, "config is NULL");
    require(
        config->struct_size == sizeof(mhcCommConfig), "mhcCommConfig.struct_size is ", config->struct_size,
        ", expected ", sizeof(mhcCommConfig), ": header and library differ");
    int const tp = config->tp_size;
    require(tp == 1 || tp == 2 || tp == 4 || tp == 8, "tp_size must be 1, 2, 4 or 8, got ", tp);
    require(config->rank >= 0 && config->rank < tp, "rank must be in 0 .. ", tp - 1, ", got ", config->rank);
    require(
        hiddenSizeSupported(config->hidden_size), "hidden_size must be 4096, 5120 or 7168, got ", config->hidden_size);
    require(
        config->capacity >= 1 && config->capacity <= kMaxCapacity, "capacity must be in 1 .. ", kMaxCapacity,
        " rows, got ", config->capacity);
    require(
        config->lanes >= 1 && config->lanes <= kMaxLanes, "lanes must be in 1 .. ", kMaxLanes, ", got ", config->lanes);
    require(
        config->on_error == MHC_ON_ERROR_RAISE || config->on_error == MHC_ON_ERROR_TRAP,
        "on_error must be 0 (raise) or 1 (trap), got ", config->on_error);
    require(
        config->wait_mode >= MHC_WAIT_AUTO && config->wait_mode <= MHC_WAIT_SPLIT,
        "wait_mode must be 0 (auto), 1 (spin), 2 (gate) or 3 (split), got ", config->wait_mode);
    int devices = 0;
    cudaError_t const counted = cudaGetDeviceCount(&devices);
    checkCuda(counted, "a communicator needs a CUDA device: cudaGetDeviceCount");
    require(
        config->device >= 0 && config->device < devices, "device must be in 0 .. ", devices - 1, ", got ",
        config->device);
    uint32_t const timeout = config->timeout_ms == 0 ? 60000u : config->timeout_ms;
    require(timeout <= 86400000u, "timeout_ms must be at most a day, got ", timeout);
    return {
        tp,
        config->rank,
        config->device,
        config->hidden_size,
        config->capacity,
        config->lanes,
        static_cast<mhcOnError>(config->on_error),
        static_cast<mhcWaitMode>(config->wait_mode),
        std::chrono::milliseconds(timeout),
        groupRanks(tp, config->group, config->group_size)};
}

std::string describe(mhcErrorRecord const& record, int lane) {
    std::string const where =
        join(" (lane ", lane, ", call ", record.sequence, ", generation ", record.generation, ")");
    std::string const tail = ". The lane stays stopped until all ranks of the group reset it.";
    switch (record.kind) {
        case MHC_ERROR_TIMEOUT:
            return join(
                "the contribution of rank ", record.rank, " for token ", record.token, " did not arrive in time", where,
                tail);
        case MHC_ERROR_HEADER_MISMATCH: {
            uint32_t const field = record.field < 4 ? record.field : 0;
            return join(
                "rank ", record.rank, " came with another ", kHeaderFields[field], ": expected ", record.expected,
                ", got ", record.got, where, tail);
        }
        case MHC_ERROR_INDEX:
            return join(
                "expanded_idx_to_permuted_idx of token ", record.token, " is ", static_cast<int>(record.got),
                ", expected -1 or 0 .. ", static_cast<int>(record.expected) - 1, where, tail);
        case MHC_ERROR_TICKET:
            return join(
                "the lane was in use by another enqueue: contexts, streams and graphs that run at the same "
                "time need lanes of their own",
                where, tail);
        case MHC_ERROR_NOT_PUBLISHED:
            return join(
                "nothing with the expected operation and rows was published before the boundary that "
                "consumes it",
                where, tail);
        default:
            return join("unknown error kind ", record.kind, where, tail);
    }
}

// ---- making, resetting, closing ------------------------------------------------------------------------------------

// The collective part of construction. Every step is answered by all ranks before the next, so that a failure on one is
// an error on all and nobody waits.
class Communicator::Setup {
public:
    explicit Setup(Communicator& comm) : c_(comm), s_(comm.settings_) {}

    void run() {
        meet();
        allocate();
        mapPeers();
        decide();
        c_.fill();
        c_.barrier();
    }

    void runSelfLoop() {
        require(s_.rank == 0, "a self-loop has one rank, 0; got ", s_.rank);
        allocateHere();
        for (int lane = 0; lane < s_.lanes; ++lane) {
            Mailbox made = box(lane, std::vector<std::byte*>(static_cast<size_t>(s_.tpSize), c_.mailbox_));
            // Peer p's mailbox begins p slots later, so that slot 0 there is slot p here.
            size_t const slot = size_t(s_.capacity) * (s_.hiddenSize / kFragment);
            for (int p = 0; p < s_.tpSize; ++p) {
                made.slots[p] += slot * p;
                made.headers[p] += size_t(s_.capacity) * p;
            }
            c_.boxes_.push_back(made);
        }
        decideHowToWait(residentRows_);
        c_.fill();
    }

private:
    void meet() {
        Introduction me{};
        me.magic = kMagic;
        me.tpSize = s_.tpSize;
        me.rank = s_.rank;
        me.hiddenSize = s_.hiddenSize;
        me.capacity = s_.capacity;
        me.lanes = s_.lanes;
        me.onError = s_.onError;
        me.waitMode = s_.waitMode;
        me.timeoutMs = static_cast<int32_t>(s_.timeout.count());
        me.device = s_.device;
        me.groupSize = static_cast<int32_t>(s_.group.size());
        std::copy(s_.group.begin(), s_.group.end(), me.group);
        auto const process = processIdentity();
        std::copy(process.begin(), process.end(), me.process);
        cudaDeviceProp properties;
        checkCuda(cudaGetDeviceProperties(&properties, s_.device), "cudaGetDeviceProperties(", s_.device, ")");
        std::memcpy(me.deviceUuid, &properties.uuid, sizeof(me.deviceUuid));
        peers_ = c_.bootstrap_->gather(me, s_.tpSize);
        for (int r = 0; r < s_.tpSize; ++r)
            compare(me, peers_[static_cast<size_t>(r)], r);
    }

    static void compare(Introduction const& me, Introduction const& peer, int r) {
        require(peer.magic == kMagic, "rank ", r, " does not speak this library's protocol");
        require(peer.rank == r, "the rank in place ", r, " of the group says it is rank ", peer.rank);
        struct {
            char const* name;
            int32_t mine, theirs;
        } const fields[] = {
            {"tp_size", me.tpSize, peer.tpSize},          {"hidden_size", me.hiddenSize, peer.hiddenSize},
            {"capacity", me.capacity, peer.capacity},     {"lanes", me.lanes, peer.lanes},
            {"on_error", me.onError, peer.onError},       {"wait_mode", me.waitMode, peer.waitMode},
            {"timeout_ms", me.timeoutMs, peer.timeoutMs}, {"group size", me.groupSize, peer.groupSize}};
        for (auto const& field : fields) {
            require(
                field.mine == field.theirs, "rank ", r, " has ", field.name, " = ", field.theirs, ", rank ", me.rank,
                " has ", field.mine, ": all ranks of a group must agree");
        }
        require(
            std::equal(me.group, me.group + me.groupSize, peer.group), "rank ", r,
            " names other world ranks in its group than rank ", me.rank);
    }

    bool sameProcess(int r) const {
        return std::memcmp(peers_[r].process, peers_[s_.rank].process, sizeof(peers_[r].process)) == 0;
    }

    bool sameDevice(int a, int b) const {
        return std::memcmp(peers_[a].deviceUuid, peers_[b].deviceUuid, sizeof(peers_[a].deviceUuid)) == 0;
    }

    void allocateHere() {
        c_.mailboxBytes_ = bytesPerLane(s_) * s_.lanes;
        checkCuda(
            cudaMalloc(reinterpret_cast<void**>(&c_.mailbox_), c_.mailboxBytes_), "cudaMalloc of ", c_.mailboxBytes_,
            " bytes for the mailbox");
        checkCuda(
            cudaMalloc(reinterpret_cast<void**>(&c_.states_), stateBytesPerLane(s_) * s_.lanes),
            "cudaMalloc of the lane states");
        checkCuda(
            cudaHostAlloc(
                reinterpret_cast<void**>(&c_.records_), sizeof(mhcErrorRecord) * s_.lanes,
                cudaHostAllocPortable | cudaHostAllocMapped),
            "cudaHostAlloc of the error records");
        checkCuda(loadAllKernels(), "loading the kernels (is the library built for this GPU?)");
        if (s_.tpSize > 1) {
            checkCuda(
                residentExchangeRows(s_.hiddenSize, s_.tpSize, residentRows_), "asking how many CTAs are resident");
        }
    }

    void allocate() {
        Offer mine{};
        try {
            allocateHere();
            mine.address = c_.mailbox_;
            mine.residentRows = residentRows_;
            bool otherProcess = false;
            for (int r = 0; r < s_.tpSize; ++r)
                otherProcess = otherProcess || !sameProcess(r);
            if (otherProcess) {
                checkCuda(cudaIpcGetMemHandle(&mine.handle, c_.mailbox_), "cudaIpcGetMemHandle");
                mine.hasHandle = 1;
            }
        } catch (std::exception const& error) {
            mine.failed = 1;
            setReason(mine.reason, error.what());
        }
        offers_ = c_.bootstrap_->gather(mine, s_.tpSize);
        requireAll(offers_, "allocating the mailbox");
    }

    void mapPeers() {
        Verdict mine{};
        std::vector<std::byte*> bases(static_cast<size_t>(s_.tpSize), nullptr);
        try {
            for (int r = 0; r < s_.tpSize; ++r)
                bases[static_cast<size_t>(r)] = mapPeer(r);
        } catch (std::exception const& error) {
            mine.failed = 1;
            setReason(mine.reason, error.what());
        }
        requireAll(c_.bootstrap_->gather(mine, s_.tpSize), "mapping the peers' mailboxes");
        for (int lane = 0; lane < s_.lanes; ++lane)
            c_.boxes_.push_back(box(lane, bases));
    }

    std::byte* mapPeer(int r) {
        if (r == s_.rank)
            return c_.mailbox_;
        Offer const& offer = offers_[static_cast<size_t>(r)];
        if (sameProcess(r)) {
            enablePeerAccess(s_.device, peers_[static_cast<size_t>(r)].device);
            return static_cast<std::byte*>(offer.address);
        }
        void* mapped = nullptr;
        checkCuda(
            cudaIpcOpenMemHandle(&mapped, offer.handle, cudaIpcMemLazyEnablePeerAccess),
            "cudaIpcOpenMemHandle of rank ", r, "'s mailbox on device ", s_.device,
            " (ranks in other processes need CUDA IPC: same host, same user, no separate PID namespace)");
        c_.openedHandles_.push_back(mapped);
        return static_cast<std::byte*>(mapped);
    }

    Mailbox box(int lane, std::vector<std::byte*> const& bases) const {
        Mailbox box{};
        for (int r = 0; r < s_.tpSize; ++r) {
            std::byte* base = bases[static_cast<size_t>(r)] + bytesPerLane(s_) * lane;
            box.slots[r] = reinterpret_cast<uint4*>(base);
            box.headers[r] = reinterpret_cast<uint4*>(base + slotBytesPerLane(s_));
        }
        std::byte* const state = c_.states_ + stateBytesPerLane(s_) * lane;
        box.state = reinterpret_cast<LaneState*>(state);
        box.rows = reinterpret_cast<RowState*>(state + sizeof(LaneState));
        void* record = nullptr;
        checkCuda(cudaHostGetDevicePointer(&record, c_.records_ + lane, 0), "cudaHostGetDevicePointer");
        box.record = static_cast<mhcErrorRecord*>(record);
        box.timeoutNanoseconds = static_cast<uint64_t>(s_.timeout.count()) * 1000000u;
        box.rank = s_.rank;
        box.tpSize = s_.tpSize;
        box.capacity = s_.capacity;
        box.hiddenSize = s_.hiddenSize;
        box.lane = lane;
        box.trapOnError = s_.onError == MHC_ON_ERROR_TRAP;
        return box;
    }

    // From what every rank knows alike, so that every rank decides alike.
    void decide() {
        c_.ranksPerDevice_ = 1;
        for (int a = 0; a < s_.tpSize; ++a) {
            int sharing = 0;
            for (int b = 0; b < s_.tpSize; ++b)
                sharing += sameDevice(a, b) ? 1 : 0;
            c_.ranksPerDevice_ = std::max(c_.ranksPerDevice_, sharing);
        }
        int resident = residentRows_;
        for (Offer const& offer : offers_)
            resident = std::min(resident, offer.residentRows);
        decideHowToWait(resident);
    }

    void decideHowToWait(int residentRows) {
        c_.waitsAtGate_ = s_.waitMode == MHC_WAIT_GATE || (s_.waitMode == MHC_WAIT_AUTO && c_.ranksPerDevice_ > 1);
        // A CTA that publishes and waits in one kernel needs those of its peers on the device beside it.
        bool const mayExchange = !c_.waitsAtGate_ && s_.waitMode != MHC_WAIT_SPLIT;
        // The kernel after it may already be resident too, waiting its turn; beside a peer it must leave room for it.
        int const kernels = c_.ranksPerDevice_ == 1 ? 1 : 2 * c_.ranksPerDevice_;
        c_.exchangeRows_ = mayExchange ? residentRows / kernels : 0;
        for (Mailbox& box : c_.boxes_)
            box.headerLast = c_.waitsAtGate_ ? 1 : 0;
    }

    Communicator& c_;
    CommSettings const& s_;
    std::vector<Introduction> peers_;
    std::vector<Offer> offers_;
    int residentRows_ = 0;
};

Communicator::Communicator(CommSettings settings, std::unique_ptr<Bootstrap> bootstrap)
    : settings_(std::move(settings)), bootstrap_(std::move(bootstrap)) {
    DeviceGuard const device(settings_.device);
    try {
        if (bootstrap_ == nullptr) {
            Setup(*this).runSelfLoop();
        } else {
            Setup(*this).run();
        }
    } catch (...) {
        release();
        throw;
    }
}

Communicator::~Communicator() {
    release();
}

void Communicator::quiesce() {
    checkCuda(cudaDeviceSynchronize(), "waiting for the device's work");
}

void Communicator::barrier() {
    if (bootstrap_ != nullptr)
        bootstrap_->gather(int32_t{1}, settings_.tpSize);
}

// Every word of the mailbox to "not arrived", every lane to its first call; complete when it returns.
void Communicator::fill() {
    checkCuda(launchFill(mailbox_, mailboxBytes_, nullptr), "filling the mailbox");
    checkCuda(cudaMemset(states_, 0, stateBytesPerLane(settings_) * settings_.lanes), "clearing the lane states");
    std::memset(records_, 0, sizeof(mhcErrorRecord) * settings_.lanes);
    quiesce();
}

void Communicator::reset() {
    require(!closed_, "the communicator is closed");
    DeviceGuard const device(settings_.device);
    quiesce();
    barrier();  // nobody may refill while a peer still publishes
    fill();
    barrier();  // nobody may publish while a peer still refills
}

void Communicator::close() {
    if (closed_.exchange(true))
        return;
    DeviceGuard const device(settings_.device);
    // Peers may still be writing here. After an error they may never come, and kernels end by themselves.
    if (errorLane(-1) < 0) {
        cudaDeviceSynchronize();
        try {
            barrier();
        } catch (Failure const&) {
            // A peer is gone: nothing is left to wait for.
        }
    }
    release();
}

void Communicator::release() noexcept {
    if (mailbox_ == nullptr && records_ == nullptr && states_ == nullptr)
        return;
    int before = 0;
    cudaGetDevice(&before);
    cudaSetDevice(settings_.device);
    cudaDeviceSynchronize();
    for (void* handle : openedHandles_)
        cudaIpcCloseMemHandle(handle);
    openedHandles_.clear();
    cudaFree(mailbox_);
    cudaFree(states_);
    cudaFreeHost(records_);
    mailbox_ = nullptr;
    states_ = nullptr;
    records_ = nullptr;
    cudaSetDevice(before);
    cudaGetLastError();
}

int Communicator::errorLane(int lane) const {
    if (records_ == nullptr)
        return -1;
    int const first = lane < 0 ? 0 : lane;
    int const last = lane < 0 ? settings_.lanes - 1 : lane;
    for (int i = first; i <= last; ++i) {
        if (static_cast<mhcErrorRecord const volatile*>(records_ + i)->kind != MHC_ERROR_NONE)
            return i;
    }
    return -1;
}

mhcCommInfo Communicator::info() const {
    mhcCommInfo info{};
    info.struct_size = sizeof(info);
    info.tp_size = settings_.tpSize;
    info.rank = settings_.rank;
    info.device = settings_.device;
    info.hidden_size = settings_.hiddenSize;
    info.capacity = settings_.capacity;
    info.lanes = settings_.lanes;
    info.ranks_per_device = ranksPerDevice_;
    info.waits_at_gate = waitsAtGate_ ? 1 : 0;
    info.exchange_rows = exchangeRows_;
    info.mailbox_bytes = mailboxBytes_;
    return info;
}

// ---- operations ----------------------------------------------------------------------------------------------------

void Communicator::checkUsable(int lane) const {
    require(!closed_, "the communicator is closed");
    require(lane >= 0 && lane < settings_.lanes, "lane must be in 0 .. ", settings_.lanes - 1, ", got ", lane);
    if (errorLane(lane) >= 0)
        fail(MHC_MAILBOX_ERROR, describe(records_[lane], lane));
}

void Communicator::launchPublishOf(
    Mailbox const& box, BoundaryArgs const& args, Chunk const& chunk, cudaStream_t stream) const {
    checkCuda(
        args.finalize.topK > 0 ? launchFinalizePublish(box, args.finalize, chunk, Launch::kOverlapped, stream)
                               : launchPublish(box, args.x, chunk, Launch::kOverlapped, stream),
        "launching the publish");
}

// Publishes, unless a producer has, and consumes `rows` rows, capacity of them at a time.
void Communicator::exchange(
    int lane, int rows, Published published, Consumer consumer, BoundaryArgs args, cudaStream_t stream) {
    Mailbox const& box = boxes_[static_cast<size_t>(lane)];
    bool const byProducer = published == Published::kByProducer;
    uint32_t const operation = operationWord(published, byProducer ? Consumer::kUnknown : consumer);
    args.publishedByProducer = byProducer ? 1 : 0;
    for (int begin = 0; begin < rows; begin += settings_.capacity) {
        args.chunk = {begin, std::min(settings_.capacity, rows - begin), rows, nextOwner(), operation};
        BoundaryShape shape{Source::kMailbox, consumer, settings_.hiddenSize, settings_.tpSize};
        if (!byProducer && args.chunk.rows <= exchangeRows_) {
            shape.source = Source::kExchange;
            checkCuda(launchBoundary(shape, box, args, Launch::kOverlapped, stream), "launching the boundary");
            continue;
        }
        if (!byProducer)
            launchPublishOf(box, args, args.chunk, stream);
        args.preload = byProducer ? 0 : 1;
        // Where ranks share a device a consumer must not take its place before everything has arrived.
        if (waitsAtGate_)
            checkCuda(launchGate(box, args.chunk, stream), "launching the gate");
        Launch const how = waitsAtGate_ ? Launch::kPlain : Launch::kOverlapped;
        checkCuda(launchBoundary(shape, box, args, how, stream), "launching the consumer");
    }
}

void Communicator::boundary(int lane, mhcBoundaryArgs const& args, cudaStream_t stream) {
    checkBoundaryArgs(args);
    if (settings_.tpSize == 1) {
        require(!closed_, "the communicator is closed");
        boundaryLocal(settings_.hiddenSize, args, stream);
        return;
    }
    checkUsable(lane);
    require(
        args.published == 0 || args.rows <= settings_.capacity,
        "a published contribution has at most capacity = ", settings_.capacity, " rows, got ", args.rows);
    Published const published = args.published != 0 ? Published::kByProducer
                                : args.top_k > 0    ? Published::kFinalize
                                                    : Published::kPlain;
    exchange(lane, args.rows, published, consumerOf(args), kernelArgs(args), stream);
}

void Communicator::publish(int lane, void const* x, int rows, cudaStream_t stream) {
    require(settings_.tpSize > 1, "publishing needs a group of more than one rank");
    require(
        rows >= 0 && rows <= settings_.capacity, "rows must be in 0 .. capacity = ", settings_.capacity, ", got ",
        rows);
    checkUsable(lane);
    if (rows == 0)
        return;
    requireAligned(x, "x");
    BoundaryArgs args{};
    args.x = static_cast<uint4 const*>(x);
    Chunk const chunk{0, rows, rows, nextOwner(), operationWord(Published::kByProducer, Consumer::kUnknown)};
    launchPublishOf(boxes_[static_cast<size_t>(lane)], args, chunk, stream);
}

namespace {

BoundaryArgs allReduceArgs(void const* x, void* sum, int rows) {
    require(rows >= 0, "rows must not be negative, got ", rows);
    if (rows > 0) {
        requireAligned(x, "x");
        requireAligned(sum, "sum");
        require(x != sum, "sum must be another tensor than x");
    }
    BoundaryArgs args{};
    args.x = static_cast<uint4 const*>(x);
    args.residualOut = static_cast<uint4*>(sum);
    return args;
}

void launchLocally(Consumer consumer, int hidden, BoundaryArgs args, int rows, cudaStream_t stream) {
    require(hiddenSizeSupported(hidden), "hidden_size must be 4096, 5120 or 7168, got ", hidden);
    for (int begin = 0; begin < rows; begin += kMaxCapacity) {
        args.chunk = {begin, std::min(kMaxCapacity, rows - begin), rows, 0, 0};
        checkCuda(
            launchBoundary({Source::kLocal, consumer, hidden, 1}, Mailbox{}, args, Launch::kOverlapped, stream),
            "launching the local boundary");
    }
}

}  // namespace

void Communicator::allReduce(int lane, void const* x, void* sum, int rows, cudaStream_t stream) {
    BoundaryArgs const args = allReduceArgs(x, sum, rows);
    if (settings_.tpSize == 1) {
        require(!closed_, "the communicator is closed");
        launchLocally(Consumer::kAllReduce, settings_.hiddenSize, args, rows, stream);
        return;
    }
    checkUsable(lane);
    exchange(lane, rows, Published::kPlain, Consumer::kAllReduce, args, stream);
}

void boundaryLocal(int hidden, mhcBoundaryArgs const& args, cudaStream_t stream) {
    checkBoundaryArgs(args);
    launchLocally(consumerOf(args), hidden, kernelArgs(args), args.rows, stream);
}

void allReduceLocal(void const* x, void* sum, int rows, int hidden, cudaStream_t stream) {
    launchLocally(Consumer::kAllReduce, hidden, allReduceArgs(x, sum, rows), rows, stream);
}

size_t coefficientsWorkspaceBytes(int rows, int hidden, bool broadcast) {
    if (rows <= 0 || hidden <= 0)
        return 0;
    return coefficientsPartialBytes(rows, broadcast ? hidden : MHC_STREAMS * hidden);
}

void coefficients(mhcCoefficientsArgs const& args, cudaStream_t stream) {
    require(
        args.struct_size == sizeof(mhcCoefficientsArgs), "mhcCoefficientsArgs.struct_size is ", args.struct_size,
        ", expected ", sizeof(mhcCoefficientsArgs), ": header and library differ");
    require(args.rows >= 0 && args.rows <= kMaxCapacity, "rows must be in 0 .. ", kMaxCapacity, ", got ", args.rows);
    require(hiddenSizeSupported(args.hidden_size), "hidden_size must be 4096, 5120 or 7168, got ", args.hidden_size);
    require(args.sinkhorn_iters >= 1, "sinkhorn_iters must be at least 1, got ", args.sinkhorn_iters);
    require(args.rms_norm_eps >= 0.0F, "rms_norm_eps must be a number >= 0, got ", args.rms_norm_eps);
    require(args.hc_eps >= 0.0F, "hc_eps must be a number >= 0, got ", args.hc_eps);
    if (args.rows == 0)
        return;
    requireAligned(args.streams, "streams");
    requireAligned(args.fn, "fn");
    requireAligned(args.workspace, "workspace");
    for (auto const& [pointer, name] :
         {std::pair{static_cast<void const*>(args.scale), "scale"},
          {args.base, "base"},
          {args.post, "post"},
          {args.comb, "comb"},
          {args.pre, "pre"}})
        require(pointer != nullptr, name, " is NULL");
    bool const broadcast = args.broadcast != 0;
    size_t const needed = coefficientsWorkspaceBytes(args.rows, args.hidden_size, broadcast);
    require(
        args.workspace_bytes >= needed, "workspace_bytes must be at least ", needed, ", got ", args.workspace_bytes);
    CoefficientsInput input{};
    input.x = static_cast<uint4 const*>(args.streams);
    input.fn = args.fn;
    input.scale = args.scale;
    input.base = args.base;
    input.partial = static_cast<float*>(args.workspace);
    input.rows = args.rows;
    input.features = broadcast ? args.hidden_size : MHC_STREAMS * args.hidden_size;
    input.sinkhornIterations = args.sinkhorn_iters;
    input.rmsNormEps = args.rms_norm_eps;
    input.hcEps = args.hc_eps;
    input.postAlpha = args.post_alpha;
    input.post = args.post;
    input.comb = args.comb;
    input.pre = args.pre;
    checkCuda(launchCoefficients(input, stream), "launching the coefficients");
}

}  // namespace mhc
