// SPDX-License-Identifier: Apache-2.0
//
// The communicator's operations: which kernels, in which order.
#include <algorithm>
#include <atomic>
#include <cstdint>

#include "arguments.h"
#include "communicator.h"
#include "status.h"

namespace mhc {
namespace {

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
        case MHC_ERROR_NCCL:
            return join(
                "the all-reduce through NCCL did not come to its end: ",
                record.field == 0   ? "a rank did not take part in it in time"
                : record.field == 1 ? "NCCL reported an error"
                                    : "its graph was captured before the reset that made a new NCCL communicator",
                record.field == 1 && record.got != 0 ? join(", ", record.got) : std::string(), " (lane ", lane, ")",
                tail);
        default:
            return join("unknown error kind ", record.kind, where, tail);
    }
}

void Communicator::checkUsable(int lane) const {
    require(!closed_, "the communicator is closed");
    require(lane >= 0 && lane < settings_.lanes, "lane must be in 0 .. ", settings_.lanes - 1, ", got ", lane);
    pollNccl(lane);
    if (errorLane(lane) >= 0)
        fail(MHC_MAILBOX_ERROR, describe(record(lane), lane));
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
    std::shared_lock<std::shared_mutex> const inUse(memory_);
    require(!closed_, "the communicator is closed");
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
    if (viaNccl(args.rows)) {
        boundaryNccl(lane, args, stream);
        return;
    }
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
    if (viaNccl(rows)) {
        checkUsable(lane);
        return;
    }
    require(
        rows >= 0 && rows <= settings_.capacity, "rows must be in 0 .. capacity = ", settings_.capacity, ", got ",
        rows);
    checkUsable(lane);
    if (rows == 0)
        return;
    requireAligned(x, "x");
    BoundaryArgs args{};
    args.x = static_cast<uint4 const*>(x);
    std::shared_lock<std::shared_mutex> const inUse(memory_);
    require(!closed_, "the communicator is closed");
    Chunk const chunk{0, rows, rows, nextOwner(), operationWord(Published::kByProducer, Consumer::kUnknown)};
    launchPublishOf(boxes_[static_cast<size_t>(lane)], args, chunk, stream);
}

// NCCL sums into the lane's workspace, so many rows at a time; the boundary kernel goes on from there as for one rank.
void Communicator::boundaryNccl(int lane, mhcBoundaryArgs const& args, cudaStream_t stream) {
    require(
        args.published == 0 || args.x != nullptr, "a published boundary of ", args.rows,
        " rows goes through NCCL and needs x: nccl_rows is ", ncclRows_);
    if (args.published != 0)
        requireAligned(args.x, "x");
    checkUsable(lane);
    std::shared_lock<std::shared_mutex> const inUse(memory_);
    require(!closed_, "the communicator is closed");
    Mailbox const& box = boxes_[static_cast<size_t>(lane)];
    uint4* const workspace = nccl_->workspace(lane);
    size_t const rowFragments = static_cast<size_t>(settings_.hiddenSize) / kFragment;
    BoundaryArgs local = kernelArgs(args);
    FinalizeInput const finalize = local.finalize;
    uint4 const* const contribution = local.x;
    local.finalize = {};
    for (int begin = 0; begin < args.rows; begin += nccl_->rows()) {
        Chunk const chunk{begin, std::min(nccl_->rows(), args.rows - begin), args.rows, nextOwner(), 0};
        size_t const skipped = begin * rowFragments;
        // Kernels count rows from the call's first one, the workspace from the chunk's.
        auto* const rows = reinterpret_cast<uint4*>(reinterpret_cast<uintptr_t>(workspace) - skipped * sizeof(uint4));
        uint4 const* send = contribution + (finalize.topK > 0 ? 0 : skipped);
        if (finalize.topK > 0) {
            BoundaryArgs finalized{};
            finalized.chunk = chunk;
            finalized.finalize = finalize;
            finalized.residualOut = rows;
            checkCuda(
                launchBoundary(
                    {Source::kLocal, Consumer::kAllReduce, settings_.hiddenSize, 1}, Mailbox{}, finalized,
                    Launch::kOverlapped, stream),
                "launching the finalize");
            send = workspace;
        }
        nccl_->sum(box, send, workspace, finalize, chunk, stream);
        local.x = rows;
        local.chunk = chunk;
        checkCuda(
            launchBoundary(
                {Source::kLocal, consumerOf(args), settings_.hiddenSize, 1}, Mailbox{}, local, Launch::kPlain, stream),
            "launching the boundary on NCCL's sum");
    }
}

void Communicator::allReduceNccl(int lane, void const* x, void* sum, int rows, cudaStream_t stream) {
    BoundaryArgs const args = allReduceArgs(x, sum, rows);
    checkUsable(lane);
    std::shared_lock<std::shared_mutex> const inUse(memory_);
    require(!closed_, "the communicator is closed");
    if (nccl_ == nullptr)
        fail(MHC_UNSUPPORTED, "the communicator was made without NCCL (", transportReason_, ")");
    if (rows == 0)
        return;
    Chunk const chunk{0, rows, rows, nextOwner(), 0};
    nccl_->sum(boxes_[static_cast<size_t>(lane)], args.x, args.residualOut, {}, chunk, stream);
}

// Rows that a producer can store itself: from nccl_rows on, nothing goes through the mailbox.
int Communicator::producerRows() const {
    require(settings_.tpSize > 1, "publishing needs a group of more than one rank");
    int const rows = ncclRows_ > 0 ? std::min(settings_.capacity, ncclRows_ - 1) : settings_.capacity;
    if (rows == 0)
        fail(MHC_UNSUPPORTED, "there is no mailbox to store into: ", transportReason_);
    return rows;
}

void Communicator::publishTarget(int lane, mhcPublishTarget& target) const {
    int const rows = producerRows();
    require(lane >= 0 && lane < settings_.lanes, "lane must be in 0 .. ", settings_.lanes - 1, ", got ", lane);
    std::shared_lock<std::shared_mutex> const inUse(memory_);
    require(!closed_, "the communicator is closed");
    Mailbox const& box = boxes_[static_cast<size_t>(lane)];
    target.tp_size = box.tpSize;
    target.rank = box.rank;
    target.hidden_size = box.hiddenSize;
    target.capacity = rows;
    target.owner = nextOwner();
    for (int r = 0; r < MHC_MAX_RANKS; ++r)
        target.slots[r] = r < box.tpSize ? box.slots[r] : nullptr;
    target.generation_stride = slotOffset(box, 1, 0, 0, 0) * sizeof(uint4);
    target.rank_stride = slotOffset(box, 0, 1, 0, 0) * sizeof(uint4);
    target.row_stride = slotOffset(box, 0, 0, 1, 0) * sizeof(uint4);
    target.state = box.rows;
}

void Communicator::markPublished(int lane, uint32_t owner, int rows, cudaStream_t stream) {
    int const most = producerRows();
    require(rows >= 0 && rows <= most, "rows that a producer stored must be in 0 .. ", most, ", got ", rows);
    require(owner != 0, "owner must be the one of a publish target, got 0");
    checkUsable(lane);
    if (rows == 0)
        return;
    std::shared_lock<std::shared_mutex> const inUse(memory_);
    require(!closed_, "the communicator is closed");
    Chunk const chunk{0, rows, rows, owner, operationWord(Published::kByProducer, Consumer::kUnknown)};
    checkCuda(launchMarkPublished(boxes_[static_cast<size_t>(lane)], chunk, stream), "launching the end of a publish");
}

void Communicator::publishLinear(int lane, mhcPublishLinearArgs const& args, cudaStream_t stream) {
    // Where the boundary goes through NCCL it takes x, and nothing is published.
    bool const publishes = settings_.tpSize > 1 && !viaNccl(args.rows);
    if (settings_.tpSize > 1)
        checkUsable(lane);
    if (!publishes) {
        require(!closed_, "the communicator is closed");
        publishLinearLocal(settings_.hiddenSize, args, stream);
        return;
    }
    LinearInput const input = linearInput(args, settings_.hiddenSize);
    require(
        input.rows <= settings_.capacity, "rows must be in 0 .. capacity = ", settings_.capacity, ", got ", input.rows);
    if (input.rows == 0)
        return;
    if (input.rows > kLinearTileRows) {
        publishLinearLocal(settings_.hiddenSize, args, stream);
        publish(lane, args.out, input.rows, stream);
        return;
    }
    std::shared_lock<std::shared_mutex> const inUse(memory_);
    require(!closed_, "the communicator is closed");
    Chunk const chunk{
        0, input.rows, input.rows, nextOwner(), operationWord(Published::kByProducer, Consumer::kUnknown)};
    checkCuda(
        launchPublishLinear(boxes_[static_cast<size_t>(lane)], input, chunk, stream),
        "launching the publishing linear layer");
}

void Communicator::allReduce(int lane, void const* x, void* sum, int rows, cudaStream_t stream) {
    if (viaNccl(rows)) {
        allReduceNccl(lane, x, sum, rows, stream);
        return;
    }
    if (settings_.tpSize == 1) {
        require(!closed_, "the communicator is closed");
        allReduceLocal(x, sum, rows, settings_.hiddenSize, stream);
        return;
    }
    BoundaryArgs const args = allReduceArgs(x, sum, rows);
    checkUsable(lane);
    exchange(lane, rows, Published::kPlain, Consumer::kAllReduce, args, stream);
}

}  // namespace mhc
