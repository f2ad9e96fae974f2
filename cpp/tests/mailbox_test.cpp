// SPDX-License-Identifier: Apache-2.0
//
// Where things lie in the mailbox and in the scales of an MXFP8 tensor.
#include "mhc/mailbox.h"

#include <gtest/gtest.h>

#include <set>

#include "mhc/mhc.h"
#include "mhc/mxfp8_layout.h"

namespace mhc {
namespace {

Mailbox boxOf(int tpSize, int capacity, int hiddenSize) {
    Mailbox box{};
    box.tpSize = tpSize;
    box.capacity = capacity;
    box.hiddenSize = hiddenSize;
    return box;
}

TEST(Mailbox, EverySlotAndHeaderHasAPlaceOfItsOwn) {
    Mailbox const box = boxOf(4, 3, 1024);
    int const fragments = box.hiddenSize / kFragment;
    std::set<size_t> slots;
    std::set<size_t> headers;
    for (uint32_t generation = 0; generation < kGenerations; ++generation) {
        for (int source = 0; source < box.tpSize; ++source) {
            for (int token = 0; token < box.capacity; ++token) {
                headers.insert(headerOffset(box, generation, source, token));
                for (int f = 0; f < fragments; ++f)
                    slots.insert(slotOffset(box, generation, source, token, f));
            }
        }
    }
    size_t const rows = size_t{kGenerations} * 4 * 3;
    EXPECT_EQ(headers.size(), rows);
    EXPECT_EQ(*headers.rbegin(), rows - 1);
    EXPECT_EQ(slots.size(), rows * static_cast<size_t>(fragments));
    EXPECT_EQ(*slots.rbegin(), rows * static_cast<size_t>(fragments) - 1);
}

TEST(Mailbox, OffsetsBeyondFourGigabytesDoNotWrap) {
    Mailbox const box = boxOf(8, 65535, 7168);
    size_t const last = slotOffset(box, 2, 7, 65534, 7168 / kFragment - 1);
    EXPECT_EQ(last + 1, size_t{3} * 8 * 65535 * 7168 / kFragment);
    EXPECT_GT(last * sizeof(uint4), size_t{1} << 32);
}

TEST(Mailbox, GenerationsGoOnAcrossTheWrapOfTheSequence) {
    EXPECT_EQ(kSequenceLimit % kGenerations, 0u);
    EXPECT_EQ((generationOf(kSequenceLimit - 1) + 1) % kGenerations, generationOf(0));
}

TEST(Mailbox, NoHeaderWordLooksLikeNothing) {
    // Sequences, rows, lanes and operation words are all below the fill word.
    EXPECT_LT(kSequenceLimit, kFillWord);
    for (Published const published : {Published::kPlain, Published::kFinalize, Published::kByProducer}) {
        for (Consumer const consumer :
             {Consumer::kUnknown, Consumer::kBoundary, Consumer::kResidualOnly, Consumer::kAllReduce}) {
            EXPECT_NE(operationWord(published, consumer), 0u);
            EXPECT_LT(operationWord(published, consumer), kFillWord);
        }
    }
}

TEST(Mxfp8Layout, ScalesOfATileAreAPermutation) {
    int const columns = scaleColumns(5120);
    ASSERT_EQ(columns, 160);
    std::set<size_t> offsets;
    for (int row = 0; row < 256; ++row) {
        for (int block = 0; block < columns; ++block)
            offsets.insert(scaleOffset(row, block, columns));
    }
    EXPECT_EQ(offsets.size(), size_t{256} * 160);
    EXPECT_EQ(*offsets.rbegin(), size_t{256} * 160 - 1);
}

TEST(Mxfp8Layout, KnownPlaces) {
    // Row 33 is second in the group of four rows 1, 33, 65, 97, which share 16 bytes; block 5 is in the second tile.
    EXPECT_EQ(scaleOffset(33, 5, 160), size_t{512 + 16 + 4 + 1});
    EXPECT_EQ(scaleOffset(128, 0, 160), size_t{128 * 160});
}

TEST(Mxfp8Layout, BytesOfTheSupportedSizes) {
    EXPECT_EQ(mhcMxfp8ScaleBytes(1, 5120), 20480u);
    EXPECT_EQ(mhcMxfp8ScaleBytes(128, 5120), 20480u);
    EXPECT_EQ(mhcMxfp8ScaleBytes(129, 5120), 40960u);
    EXPECT_EQ(mhcMxfp8ScaleBytes(7, 4096), 16384u);
    EXPECT_EQ(mhcMxfp8ScaleBytes(7, 7168), 28672u);
    EXPECT_EQ(mhcMxfp8ScaleBytes(0, 5120), 0u);
}

}  // namespace
}  // namespace mhc
