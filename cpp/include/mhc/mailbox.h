// SPDX-License-Identifier: Apache-2.0
//
// The mailbox: how the ranks' contributions to one boundary reach each other, and the state machine that keeps calls
// apart.
//
// Memory. Every rank owns, per lane, slots [3 generations][tp ranks][capacity rows][H] of bf16 and a 16-byte header for
// each of those rows. All ranks of the group can store into it; only its owner reads it. A half-word 0x8000 (bf16 -0)
// means "not arrived"; contributions never contain it, because a publisher turns -0 into +0. So the payload is its own
// flag, and no fence is needed between data and flag. A header is {sequence, rows, operation, lane}; none of its words
// can be 0x80008000, the fill pattern.
//
// Rows run independently: each has a number of its own for its next call, read and advanced by the CTAs of that row
// alone. Row t takes part in the calls of more than t rows, on every rank alike. Call number n of a row, generation
// g = n mod 3, on every rank:
//   publish   takes the row's ticket (0 -> the enqueue's owner number), reads n = next, and stores the row and its
//             header into generation g of every rank's mailbox.
//   consume   reads n = next; polls its own mailbox until all ranks' fragments and headers of generation g are there;
//             compares every header with what it expects; computes; stores the fill pattern over what it consumed.
//             When all CTAs of the row have come that far, one thread clears the headers, writes next = n + 1 and
//             gives the ticket back.
// Both may be one kernel. As two, publish leaves a note {operation, rows} that the consumer checks. A producer that is
// not ours stores rows only; a kernel after it does the rest of the publish (mhcMarkPublished).
//
// A rank can store a row into generation g again only in call n + 3. Before that it has consumed n + 2, for which it
// needed this rank's publish of n + 2, which follows this rank's consume of n + 1 in stream order, and so the clearing
// of n. Two generations would do if a publish never overlapped the consume before it; the third allows programmatic
// launch.
//
// The ticket finds a second user of a row while the first is in it. Two enqueues that run on one lane at once could
// still pass each other between rows: so each row is also counted when it begins, for the whole lane, and a row that
// finds another enqueue begun and not all its rows counted stops the lane (cpp/tests/model, two_streams_exchange).
// Whoever runs things at once gives each a lane.
//
// Errors. Whoever finds one (time-out, other header, ticket taken, nothing published) writes the lane's record once,
// sets the lane's error word, and neither advances nor clears. Its outputs, and those of every later call on the lane,
// are NaN, without waiting. Only the collective reset leaves that state: synchronise, barrier, refill, synchronise,
// barrier.
#pragma once

#include <vector_types.h>

#include <cstddef>
#include <cstdint>

#include "mhc/mhc.h"

#ifdef __CUDACC__
#define MHC_HOST_DEVICE __host__ __device__
#else
#define MHC_HOST_DEVICE
#endif

namespace mhc {

constexpr int kGenerations = 3;
constexpr uint32_t kFillWord = 0x80008000u;  // two bf16 -0
constexpr uint32_t kNaNWord = 0x7FC07FC0u;   // two bf16 NaN
// A multiple of 3 below 2^31, so that generation and sequence wrap together and no header word can be the fill.
constexpr uint32_t kSequenceLimit = 3u << 29;
constexpr int kFragment = 8;  // bf16 elements that one thread handles: 16 bytes
constexpr int kThreads = 128;
constexpr int kElementsPerCta = kThreads * kFragment;
constexpr int kMaxCtas = 8;  // of a row: a portable cluster

// What a contribution is, in its header: how it was published (low byte) and who will consume it (second byte).
enum class Published : uint32_t { kPlain = 1, kFinalize = 2, kByProducer = 3 };
enum class Consumer : uint32_t { kUnknown = 0, kBoundary = 1, kResidualOnly = 2, kAllReduce = 3 };
MHC_HOST_DEVICE constexpr uint32_t operationWord(Published published, Consumer consumer) {
    return static_cast<uint32_t>(published) | (static_cast<uint32_t>(consumer) << 8);
}

// Of one lane, in this rank's device memory; other ranks never touch it.
struct alignas(16) LaneState {
    uint32_t error;            // mhcErrorKind; not zero: the lane is stopped
    uint32_t errorOwner;       // the enqueue that stopped it
    unsigned long long begun;  // rows that an enqueue has begun while others are to come, and as many times its number
};

// Of one row of a lane, likewise.
struct alignas(16) RowState {
    uint32_t next;       // number of the row's next call
    uint32_t ticket;     // owner number of the enqueue in flight, 0 = free
    uint32_t operation;  // operation word of what was published for a consumer of its own, 0 = nothing
    uint32_t rows;       // M of that call
};

// One lane as a kernel sees it; passed by value.
struct Mailbox {
    uint4* slots[MHC_MAX_RANKS];    // rank r's slots, at the address this rank reaches them
    uint4* headers[MHC_MAX_RANKS];  // likewise
    LaneState* state;
    RowState* rows;          // [capacity]
    mhcErrorRecord* record;  // in host memory
    uint64_t timeoutNanoseconds;
    int32_t rank;
    int32_t tpSize;
    int32_t capacity;
    int32_t hiddenSize;
    int32_t lane;
    int32_t trapOnError;
    int32_t headerLast;  // 1: a header is stored after the whole of its row, for the gate kernel
};

MHC_HOST_DEVICE constexpr uint32_t generationOf(uint32_t sequence) {
    return sequence % kGenerations;
}

// Offsets in 16-byte units within one lane's slots and headers.
MHC_HOST_DEVICE constexpr size_t slotOffset(
    Mailbox const& box, uint32_t generation, int source, int token, int fragment) {
    return ((static_cast<size_t>(generation) * box.tpSize + source) * box.capacity + token) *
               (box.hiddenSize / kFragment) +
           fragment;
}

// The same of this rank as the source, with what a kernel knows at compile time.
template <int kTp>
MHC_HOST_DEVICE constexpr size_t slotOffset(
    Mailbox const& box, uint32_t generation, int token, int fragment, int rowFragments) {
    return static_cast<size_t>(
               (generation * kTp + static_cast<uint32_t>(box.rank)) * static_cast<uint32_t>(box.capacity) +
               static_cast<uint32_t>(token)) *
               static_cast<uint32_t>(rowFragments) +
           static_cast<uint32_t>(fragment);
}

MHC_HOST_DEVICE constexpr size_t headerOffset(Mailbox const& box, uint32_t generation, int source, int token) {
    return (static_cast<size_t>(generation) * box.tpSize + source) * box.capacity + token;
}

}  // namespace mhc
