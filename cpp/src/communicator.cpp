// SPDX-License-Identifier: Apache-2.0
#include "communicator.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <set>

#include "agreement.h"
#include "device_guard.h"
#include "status.h"

namespace mhc {
namespace {

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

// What the ranks tell each other first. Trivially copyable, and without padding that could differ.
struct Introduction {
    int32_t magic;
    int32_t tpSize, rank, hiddenSize, capacity, lanes, onError, waitMode, timeoutMs, reserved;
    int32_t ncclRows, ncclWorkspaceRows;
    int32_t ncclSharesDevices;  // this process lets NCCL have several ranks on one device
    int32_t groupSize;
    int32_t group[MHC_MAX_GROUP];
    RankLocation location;
};
constexpr int32_t kMagic = 0x4D484333;

// How a rank reaches the others.
struct Sight {
    int32_t failed;
    char reason[252];
    ReachRow row;
};

struct Offer {
    int32_t failed;
    char reason[252];
    void* address;
    cudaIpcMemHandle_t handle;
    int32_t hasHandle;
    int32_t residentRows;  // of a kernel that exchanges
};

// The mailbox cannot be used, but nothing is wrong.
class NoPeerAccess : public Failure {
public:
    explicit NoPeerAccess(std::string const& sentence) : Failure(MHC_UNSUPPORTED, sentence) {}
};

// How the mapping of the peers' mailboxes went.
struct Mapping {
    int32_t failed;
    char reason[252];
    int32_t noPeerAccess;
};

void enablePeerAccess(int from, int to) {
    if (from == to)
        return;
    cudaError_t const status = cudaDeviceEnablePeerAccess(to, 0);
    if (status == cudaErrorPeerAccessAlreadyEnabled) {
        cudaGetLastError();
        return;
    }
    checkCuda(status, "cudaDeviceEnablePeerAccess from device ", from, " to ", to);
}

// Groups are made over and over in one process: a sentence is said once.
void logOnce(std::string const& sentence) {
    static auto* const mutex = new std::mutex;
    static auto* const said = new std::set<std::string>;
    constexpr size_t kMostSentences = 256;
    char const* const wanted = std::getenv("TRTLLM_MHC_LOG");
    if (wanted != nullptr && std::strcmp(wanted, "off") == 0)
        return;
    std::lock_guard<std::mutex> const lock(*mutex);
    if (said->size() < kMostSentences && said->insert(sentence).second)
        std::fprintf(stderr, "[trtllm_mhc] %s\n", sentence.c_str());
}

}  // namespace

// The collective part of construction. Every step is answered by all ranks before the next, so that a failure on one is
// an error on all and nobody waits.
class Communicator::Setup {
public:
    explicit Setup(Communicator& comm) : c_(comm), s_(comm.settings_) {}

    void run() {
        meet();
        lookAtPeers();
        allocate();
        mapPeers();
        decide();
        decideOnNccl();
        c_.fill();
        c_.barrier();
        if (s_.rank == 0 && s_.tpSize > 1)
            logOnce(c_.sentence());
    }

    void runSelfLoop() {
        require(s_.rank == 0, "a self-loop has one rank, 0; got ", s_.rank);
        c_.locations_.assign(static_cast<size_t>(s_.tpSize), locate(s_.device));
        ReachRow itself{};
        std::fill(std::begin(itself.to), std::end(itself.to), static_cast<int32_t>(MHC_REACH_SELF));
        c_.reach_.assign(static_cast<size_t>(s_.tpSize), itself);
        c_.multicastReason_ = "one rank plays all";
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
        c_.transportReason_ = "one rank plays all";
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
        me.ncclRows = s_.ncclRows;
        me.ncclWorkspaceRows = s_.ncclWorkspaceRows;
        // NCCL's own switch, from 2.30 on.
        char const* const shares = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
        me.ncclSharesDevices = shares != nullptr && std::strcmp(shares, "1") == 0 ? 1 : 0;
        me.groupSize = static_cast<int32_t>(s_.group.size());
        std::copy(s_.group.begin(), s_.group.end(), me.group);
        me.location = locate(s_.device);
        peers_ = c_.bootstrap_->gather(me, s_.tpSize);
        for (int r = 0; r < s_.tpSize; ++r)
            compare(me, peers_[static_cast<size_t>(r)], r);
        for (Introduction const& peer : peers_)
            c_.locations_.push_back(peer.location);
        c_.ranksPerDevice_ = mostRanksOnADevice(c_.locations_);
    }

    // Whether there is a mailbox at all, before anything is allocated for it.
    void lookAtPeers() {
        Sight mine{};
        try {
            mine.row = lookAround(c_.locations_, s_.rank);
        } catch (std::exception const& error) {
            mine.failed = 1;
            setReason(mine.reason, error.what());
        }
        std::vector<Sight> const all = c_.bootstrap_->gather(mine, s_.tpSize);
        requireAll(all, "asking how the ranks reach each other's memory");
        for (Sight const& sight : all)
            c_.reach_.push_back(sight.row);
        noPeerAccess_ = firstObstacle(c_.locations_, c_.reach_);
        std::string const obstacle = multicastObstacle(c_.locations_, c_.reach_);
        c_.multicastReason_ =
            obstacle.empty() ? "every rank could, but storing through it has not been run on hardware here" : obstacle;
    }

    static void compare(Introduction const& me, Introduction const& peer, int r) {
        require(peer.magic == kMagic, "rank ", r, " does not speak this library's protocol");
        require(peer.rank == r, "the rank in place ", r, " of the group says it is rank ", peer.rank);
        struct {
            char const* name;
            int32_t mine, theirs;
        } const fields[] = {{"tp_size", me.tpSize, peer.tpSize},
                            {"hidden_size", me.hiddenSize, peer.hiddenSize},
                            {"capacity", me.capacity, peer.capacity},
                            {"lanes", me.lanes, peer.lanes},
                            {"on_error", me.onError, peer.onError},
                            {"wait_mode", me.waitMode, peer.waitMode},
                            {"timeout_ms", me.timeoutMs, peer.timeoutMs},
                            {"group size", me.groupSize, peer.groupSize},
                            {"nccl_rows", me.ncclRows, peer.ncclRows},
                            {"nccl_workspace_rows", me.ncclWorkspaceRows, peer.ncclWorkspaceRows}};
        for (auto const& field : fields) {
            require(
                field.mine == field.theirs, "rank ", r, " has ", field.name, " = ", field.theirs, ", rank ", me.rank,
                " has ", field.mine, ": all ranks of a group must agree");
        }
        require(
            std::equal(me.group, me.group + me.groupSize, peer.group), "rank ", r,
            " names other world ranks in its group than rank ", me.rank);
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
            for (RankLocation const& peer : c_.locations_)
                otherProcess = otherProcess || !sameProcess(peer, c_.locations_[static_cast<size_t>(s_.rank)]);
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
        Mapping mine{};
        std::vector<std::byte*> bases(static_cast<size_t>(s_.tpSize), nullptr);
        try {
            for (int r = 0; noPeerAccess_.empty() && r < s_.tpSize; ++r)
                bases[static_cast<size_t>(r)] = mapPeer(r);
        } catch (NoPeerAccess const& error) {
            mine.noPeerAccess = 1;
            setReason(mine.reason, error.what());
        } catch (std::exception const& error) {
            mine.failed = 1;
            setReason(mine.reason, error.what());
        }
        std::vector<Mapping> const all = c_.bootstrap_->gather(mine, s_.tpSize);
        requireAll(all, "mapping the peers' mailboxes");
        for (size_t r = all.size(); r-- > 0;) {
            if (all[r].noPeerAccess != 0)
                noPeerAccess_ = join("rank ", r, ": ", readReason(all[r].reason));
        }
        for (int lane = 0; lane < s_.lanes; ++lane)
            c_.boxes_.push_back(box(lane, bases));
    }

    std::byte* mapPeer(int r) {
        if (r == s_.rank)
            return c_.mailbox_;
        Offer const& offer = offers_[static_cast<size_t>(r)];
        require(offer.residentRows >= 0, "rank ", r, " says that ", offer.residentRows, " rows are resident at once");
        RankLocation const& peer = c_.locations_[static_cast<size_t>(r)];
        if (sameProcess(peer, c_.locations_[static_cast<size_t>(s_.rank)])) {
            int const device = peer.device;
            requireDeviceMemory(offer.address, device, r);
            enablePeerAccess(s_.device, device);
            return static_cast<std::byte*>(offer.address);
        }
        void* mapped = nullptr;
        cudaError_t const opened = cudaIpcOpenMemHandle(&mapped, offer.handle, cudaIpcMemLazyEnablePeerAccess);
        if (opened == cudaErrorPeerAccessUnsupported) {
            cudaGetLastError();
            throw NoPeerAccess(join(
                "device ", s_.device, " cannot access the memory of device ", peer.device, " of rank ", r,
                " (cudaIpcOpenMemHandle): the mailbox needs peer access (NVLink, or PCIe with P2P enabled)"));
        }
        checkCuda(
            opened, "cudaIpcOpenMemHandle of rank ", r, "'s mailbox on device ", s_.device,
            " (ranks in other processes need CUDA IPC: same host, same user, no separate PID namespace)");
        c_.openedHandles_.push_back(mapped);
        return static_cast<std::byte*>(mapped);
    }

    static void requireDeviceMemory(void const* address, int device, int r) {
        cudaPointerAttributes attributes{};
        checkCuda(cudaPointerGetAttributes(&attributes, address), "looking at rank ", r, "'s mailbox");
        require(
            attributes.type == cudaMemoryTypeDevice && attributes.device == device, "rank ", r,
            " names a mailbox that is not memory of its device ", device, ": ", address);
    }

    Mailbox box(int lane, std::vector<std::byte*> const& bases) const {
        Mailbox box{};
        for (int r = 0; r < s_.tpSize; ++r) {
            if (bases[static_cast<size_t>(r)] == nullptr)
                continue;  // out of reach: NCCL carries everything
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
        int resident = residentRows_;
        for (Offer const& offer : offers_)
            resident = std::min(resident, offer.residentRows);
        decideHowToWait(resident);
    }

    // Likewise.
    void decideOnNccl() {
        bool const apart = !noPeerAccess_.empty();
        bool const allowed =
            std::all_of(peers_.begin(), peers_.end(), [](Introduction const& peer) { return peer.ncclSharesDevices; });
        bool const shared = c_.ranksPerDevice_ > 1 && !allowed;
        if (apart && (shared || s_.ncclRows < 0)) {
            fail(
                MHC_PEER_FAILED, noPeerAccess_, "; NCCL would do without, but ",
                shared ? "ranks share a device" : "nccl_rows is -1");
        }
        c_.transport_ = s_.tpSize == 1 ? MHC_TRANSPORT_LOCAL : MHC_TRANSPORT_MAILBOX;
        if (!apart && s_.ncclRows <= 0) {
            c_.transportReason_ =
                s_.ncclRows < 0 ? "nccl_rows is -1: never" : "nccl_rows is 0, and all ranks have peer access";
            return;
        }
        if (shared) {
            c_.transportReason_ = join(
                "nccl_rows is ", s_.ncclRows, ", but up to ", c_.ranksPerDevice_,
                " ranks share a device, which NCCL does not allow");
            return;
        }
        joinNccl(apart);
        c_.ncclRows_ = apart ? 1 : s_.ncclRows;
        c_.transport_ = apart ? MHC_TRANSPORT_NCCL : MHC_TRANSPORT_MAILBOX_NCCL;
        c_.transportReason_ = apart ? noPeerAccess_ : join("nccl_rows is ", s_.ncclRows);
    }

    void joinNccl(bool apart) {
        Verdict mine{};
        try {
            NcclLibrary::instance();
        } catch (std::exception const& error) {
            mine.failed = 1;
            setReason(mine.reason, error.what());
        }
        std::string const step = apart ? noPeerAccess_ + "; loading NCCL, which does without," : "loading NCCL";
        requireAll(c_.bootstrap_->gather(mine, s_.tpSize), step.c_str());
        NcclPath::Settings const settings{
            s_.rank, s_.tpSize, s_.device, s_.hiddenSize, s_.lanes, s_.ncclWorkspaceRows, s_.timeout};
        c_.nccl_ = std::make_unique<NcclPath>(settings, *c_.bootstrap_, c_.records_);
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
    std::string noPeerAccess_;  // the first rank that has none to a peer, and to which
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
    {
        // Others may be asking for the status meanwhile.
        std::unique_lock<std::shared_mutex> const alone(memory_);
        std::memset(records_, 0, sizeof(mhcErrorRecord) * settings_.lanes);
    }
    quiesce();
}

void Communicator::reset() {
    require(!closed_, "the communicator is closed");
    DeviceGuard const device(settings_.device);
    quiesce();
    barrier();  // nobody may refill while a peer still publishes
    if (nccl_ != nullptr)
        nccl_->reset(*bootstrap_);
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
    std::unique_lock<std::shared_mutex> const alone(memory_);
    release();
}

void Communicator::release() noexcept {
    if (mailbox_ == nullptr && records_ == nullptr && states_ == nullptr)
        return;
    int before = 0;
    cudaGetDevice(&before);
    cudaSetDevice(settings_.device);
    cudaDeviceSynchronize();
    nccl_.reset();
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
    std::shared_lock<std::shared_mutex> const inUse(memory_);
    if (records_ == nullptr)
        return -1;
    int const first = lane < 0 ? 0 : lane;
    int const last = lane < 0 ? settings_.lanes - 1 : lane;
    for (int i = first; i <= last; ++i) {
        if (__atomic_load_n(&records_[i].kind, __ATOMIC_ACQUIRE) != MHC_ERROR_NONE)
            return i;
    }
    return -1;
}

void Communicator::pollNccl(int lane) const {
    std::shared_lock<std::shared_mutex> const inUse(memory_);
    if (nccl_ != nullptr)
        nccl_->poll(lane);
}

mhcErrorRecord Communicator::record(int lane) const {
    std::shared_lock<std::shared_mutex> const inUse(memory_);
    return records_ == nullptr ? mhcErrorRecord{} : records_[lane];
}

std::string Communicator::sentence() const {
    auto const uses = [&](mhcReach reach) {
        return std::any_of(reach_.begin(), reach_.end(), [&](ReachRow const& row) {
            return std::find(row.to, row.to + settings_.tpSize, static_cast<int32_t>(reach)) !=
                   row.to + settings_.tpSize;
        });
    };
    std::string carried = "nothing is carried";
    if (transport_ == MHC_TRANSPORT_NCCL) {
        carried = "NCCL for every M";
    } else if (transport_ != MHC_TRANSPORT_LOCAL) {
        bool const direct = uses(MHC_REACH_PEER_ACCESS), ipc = uses(MHC_REACH_IPC);
        carried = join(
            "mailbox by ", direct ? "peer access" : "", direct && ipc ? " and " : "", ipc ? "CUDA IPC" : "",
            transport_ == MHC_TRANSPORT_MAILBOX_NCCL ? join(", NCCL for M of ", ncclRows_, " and more") : "");
    }
    return join(
        "tensor-parallel group ", listOf(settings_.group), ", hidden size ", settings_.hiddenSize, ": ", carried, " (",
        transportReason_, "); at most ", ranksPerDevice_, " rank(s) a device, ",
        waitsAtGate_ ? "a gate waits"
                     : join("every CTA waits, in one kernel with the publish up to M = ", exchangeRows_),
        "; capacity ", settings_.capacity, " rows, ", settings_.lanes, " lane(s), time-out ", settings_.timeout.count(),
        " ms, on error ", settings_.onError == MHC_ON_ERROR_TRAP ? "trap" : "raise",
        "; no NVLink multicast: ", multicastReason_);
}

mhcGroupInfo Communicator::groupInfo() const {
    mhcGroupInfo info{};
    info.struct_size = sizeof(info);
    info.timeout_ms = static_cast<uint32_t>(settings_.timeout.count());
    info.on_error = settings_.onError;
    info.wait_mode = settings_.waitMode;
    for (size_t a = 0; a < locations_.size(); ++a) {
        auto const firstLike = [&](bool (*same)(RankLocation const&, RankLocation const&)) {
            size_t first = 0;
            while (!same(locations_[first], locations_[a]))
                ++first;
            return static_cast<int32_t>(first);
        };
        info.device[a] = locations_[a].device;
        info.first_in_process[a] = firstLike(sameProcess);
        info.first_on_device[a] = firstLike(sameDevice);
        std::copy_n(reach_[a].to, locations_.size(), info.reach[a]);
    }
    std::snprintf(info.multicast_reason, sizeof(info.multicast_reason), "%s", multicastReason_.c_str());
    std::snprintf(info.sentence, sizeof(info.sentence), "%s", sentence().c_str());
    return info;
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
    info.transport = transport_;
    info.nccl_rows = ncclRows_;
    std::snprintf(info.transport_reason, sizeof(info.transport_reason), "%s", transportReason_.c_str());
    std::shared_lock<std::shared_mutex> const inUse(memory_);
    if (nccl_ != nullptr) {
        info.nccl_workspace_rows = nccl_->rows();
        info.nccl_version = nccl_->version();
    }
    return info;
}

}  // namespace mhc
