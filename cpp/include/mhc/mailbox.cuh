// SPDX-License-Identifier: Apache-2.0
//
// What kernels do with the mailbox; mailbox.h says why.
#pragma once

#include <cstdint>

#include "mhc/mailbox.h"
#include "mhc/ptx.cuh"

namespace mhc {

// bf16 -0 becomes +0 in both halves.
__device__ __forceinline__ uint32_t clearNegativeZero(uint32_t word) {
    return word & ~__vcmpeq2(word, kFillWord);
}

__device__ __forceinline__ uint4 clearNegativeZero(uint4 v) {
    return {clearNegativeZero(v.x), clearNegativeZero(v.y), clearNegativeZero(v.z), clearNegativeZero(v.w)};
}

// Not zero if one of the two halves is 0x8000. The borrow of a zero lower half can only reach an upper half when the
// answer is already that.
__device__ __forceinline__ uint32_t sentinelBits(uint32_t word) {
    uint32_t const x = word ^ kFillWord;
    return (x - 0x00010001u) & ~x & 0x80008000u;
}

__device__ __forceinline__ uint32_t sentinelBits(uint4 v) {
    return sentinelBits(v.x) | sentinelBits(v.y) | sentinelBits(v.z) | sentinelBits(v.w);
}

__device__ __forceinline__ bool headerMissing(uint4 v) {
    return v.x == kFillWord || v.y == kFillWord || v.z == kFillWord || v.w == kFillWord;
}

__device__ __forceinline__ uint4 filled(uint32_t word) {
    return {word, word, word, word};
}

// Where an error was found.
struct Finding {
    mhcErrorKind kind;
    int rank;
    int token;
    uint32_t sequence;
    uint32_t expected;
    uint32_t got;
    uint32_t field;
};

// Stops the lane. The first caller writes the record; the host sees `kind` last.
inline __device__ __noinline__ void recordError(Mailbox const& box, uint32_t owner, Finding const& finding) {
    auto* const word = reinterpret_cast<unsigned long long*>(box.state);  // error and errorOwner at once
    auto const stopped = static_cast<unsigned long long>(owner) << 32 | static_cast<uint32_t>(finding.kind);
    if (atomicCAS(word, 0ull, stopped) == 0ull) {
        mhcErrorRecord volatile* record = box.record;
        record->rank = finding.rank;
        record->token = finding.token;
        record->generation = generationOf(finding.sequence);
        record->sequence = finding.sequence;
        record->expected = finding.expected;
        record->got = finding.got;
        record->field = finding.field;
        __threadfence_system();
        record->kind = static_cast<uint32_t>(finding.kind);
        __threadfence_system();
    }
    if (box.trapOnError)
        __trap();
}

// Takes the row for the enqueue `owner`, or stops the lane. Called by one thread of every publishing CTA of the row;
// true: publish. An index error is found while publishing and must not keep the call's other rows from the peers.
__device__ __forceinline__ bool takeTicket(Mailbox const& box, int token, uint32_t owner, uint32_t& sequence) {
    RowState* row = box.rows + token;
    uint32_t const holder = atomicCAS(&row->ticket, 0u, owner);
    sequence = ptx::loadRelaxedDevice(&row->next);
    uint2 const lane = ptx::loadRelaxedDevice(reinterpret_cast<uint2 const*>(box.state));
    if (lane.x != MHC_ERROR_NONE && !(lane.x == MHC_ERROR_INDEX && lane.y == owner))
        return false;
    if (holder != 0u && holder != owner) {
        recordError(box, owner, {MHC_ERROR_TICKET, box.rank, token, sequence, owner, holder, 0});
        return false;
    }
    return true;
}

// Counts a row of the enqueue `owner`, which has `rows` of them, as begun; or stops the lane, if another enqueue has
// begun some of its rows and not all. Rows run independently, so that their tickets alone would let two enqueues cross
// between them. Called once for a row, before its header is published.
__device__ __forceinline__ bool enterLane(Mailbox const& box, int token, uint32_t owner, int rows) {
    // The upper half sums owner numbers and the lower half counts: one atomic operation compares and advances.
    unsigned long long const mine = static_cast<unsigned long long>(owner) << 32 | 1u;
    unsigned long long const before = atomicAdd(&box.state->begun, mine);
    auto const begun = static_cast<uint32_t>(before);
    auto const owners = static_cast<uint32_t>(before >> 32);
    if (owners != begun * owner || begun >= static_cast<uint32_t>(rows)) {
        uint32_t const sequence = ptx::loadRelaxedDevice(&box.rows[token].next);
        recordError(box, owner, {MHC_ERROR_TICKET, box.rank, token, sequence, owner, owners, 0});
        return false;
    }
    if (begun + 1 == static_cast<uint32_t>(rows))
        atomicAdd(&box.state->begun, 0ull - static_cast<unsigned long long>(rows) * mine);
    return true;
}

// Stores one fragment at every rank, the neighbours first, so that the ranks do not all write to rank 0 at once; the
// last is this rank itself.
__device__ __forceinline__ void storeFragment(Mailbox const& box, uint32_t sequence, int token, int fragment, uint4 v) {
    size_t const offset = slotOffset(box, generationOf(sequence), box.rank, token, fragment);
    int peer = box.rank;
    for (int i = 0; i < box.tpSize; ++i) {
        peer = peer + 1 == box.tpSize ? 0 : peer + 1;
        ptx::storeRelaxedSystem(box.slots[peer] + offset, v);
    }
}

// The header of a row; all ranks that are in the same call make the same one.
__device__ __forceinline__ uint4 headerOf(Mailbox const& box, uint32_t sequence, int rows, uint32_t operation) {
    return {sequence, static_cast<uint32_t>(rows), operation, static_cast<uint32_t>(box.lane)};
}

__device__ __forceinline__ bool sameHeader(uint4 a, uint4 b) {
    return a.x == b.x && a.y == b.y && a.z == b.z && a.w == b.w;
}

// Stores the header of this rank's row at every rank. Called by threads 0 .. tp-1 of one CTA of the row.
template <bool kToSelf>
__device__ __forceinline__ void publishHeader(Mailbox const& box, int token, uint4 header) {
    int const peer = static_cast<int>(threadIdx.x);
    if (peer < box.tpSize && (kToSelf || peer != box.rank)) {
        size_t const at = headerOffset(box, generationOf(header.x), box.rank, token);
        ptx::storeRelaxedSystem(box.headers[peer] + at, header);
    }
}

// Tells of a row that is stored, for a consumer that is a kernel of its own: its header goes to every rank, a note to
// that consumer. Called by threads 0 .. tp-1 of one CTA of the row.
__device__ __forceinline__ void announceRow(
    Mailbox const& box, int token, uint32_t sequence, int rows, uint32_t operation) {
    publishHeader<true>(box, token, headerOf(box, sequence, rows, operation));
    if (threadIdx.x == 0) {
        box.rows[token].operation = operation;
        box.rows[token].rows = static_cast<uint32_t>(rows);
    }
}

// `source` is in another call than this rank.
inline __device__ __noinline__ void recordOtherHeader(
    Mailbox const& box, uint32_t owner, int source, int row, uint4 expected, uint4 header) {
    uint32_t const ours[] = {expected.x, expected.y, expected.z, expected.w};
    uint32_t const theirs[] = {header.x, header.y, header.z, header.w};
    uint32_t field = 0;
    while (field < 3 && theirs[field] == ours[field])
        ++field;
    recordError(box, owner, {MHC_ERROR_HEADER_MISMATCH, source, row, expected.x, ours[field], theirs[field], field});
}

// A bounded wait: whether to go on. Looks at the clock and at the lane's error word now and then only.
class Deadline {
public:
    __device__ explicit Deadline(Mailbox const& box) : box_(box) {}

    // False once the lane has an error or the time is over; `late` says which.
    __device__ __forceinline__ bool keepWaiting(bool& late) {
        if ((++polls_ & kPollMask) != 0)
            return true;
        if (ptx::loadRelaxedDevice(&box_.state->error) != MHC_ERROR_NONE)
            return false;
        uint64_t const now = ptx::globalTimer();
        if (end_ == 0)
            end_ = now + box_.timeoutNanoseconds;
        late = now > end_;
        return !late;
    }

private:
    static constexpr uint32_t kPollMask = 31;
    Mailbox const& box_;
    uint64_t end_ = 0;
    uint32_t polls_ = 0;
};

}  // namespace mhc
