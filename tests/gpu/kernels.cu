// SPDX-License-Identifier: Apache-2.0
//
// Kernels of the tests: sleeping, producers that are not the library's own, and the stress test's data and checks.
#include <cstdint>

namespace {

__device__ uint64_t now() {
    uint64_t t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}

__device__ void sleepFor(uint64_t nanoseconds) {
    uint64_t const end = now() + nanoseconds;
    while (now() < end)
        __nanosleep(200);
}

}  // namespace

extern "C" __global__ void sleepKernel(uint64_t nanoseconds) {
    sleepFor(nanoseconds);
}

// ---- a producer that stores rows through a publish target, one CTA a row
// ---------------------------------------------

struct Target {
    uint16_t* slots[8];
    uint64_t generationStride;  // bytes
    uint64_t rankStride;
    uint64_t rowStride;
    uint32_t* state;  // [capacity][4]: next, ticket, operation, rows
    uint32_t owner;
    int32_t tp;
    int32_t rank;
    int32_t hidden;
    int32_t takesTicket;
    // The 16 bytes of row `lateRow` at `lateFragment` come so much later; lateRow < 0: none.
    int32_t lateRow;
    int32_t lateFragment;
    uint64_t lateNanoseconds;
};

extern "C" __global__ void producerKernel(Target target, uint16_t const* x) {
    int const row = static_cast<int>(blockIdx.x);
    uint32_t* state = target.state + 4 * row;
    __shared__ bool granted;
    if (threadIdx.x == 0) {
        uint32_t const holder = target.takesTicket ? atomicCAS(state + 1, 0u, target.owner) : 0u;
        granted = holder == 0u || holder == target.owner;
    }
    __syncthreads();
    if (!granted)
        return;
    uint32_t const next = *reinterpret_cast<uint32_t volatile*>(state);
    uint64_t const offset =
        next % 3 * target.generationStride + target.rank * target.rankStride + row * target.rowStride;
    for (int fragment = static_cast<int>(threadIdx.x); fragment < target.hidden / 8;
         fragment += static_cast<int>(blockDim.x)) {
        if (row == target.lateRow && fragment == target.lateFragment)
            sleepFor(target.lateNanoseconds);
        for (int i = 8 * fragment; i < 8 * fragment + 8; ++i) {
            uint16_t const v = x[static_cast<uint64_t>(row) * target.hidden + i];
            for (int r = 0; r < target.tp; ++r) {
                auto* slot =
                    reinterpret_cast<uint16_t volatile*>(reinterpret_cast<unsigned char*>(target.slots[r]) + offset);
                slot[i] = v == 0x8000 ? 0 : v;
            }
        }
    }
}

// ---- the stress test -----------------------------------------------------------------------------------------------

// Rows that calls take their inputs from, and what they give.
struct Pool {
    uint4 const* x;  // [rows,H] bf16
    uint4 const* shared;
    uint4 const* residual;   // [rows,4,H]
    uint4 const* streams;    // [rows,4,H]
    uint4 const* normed;     // [rows,H]
    uint4 const* sum;        // [rows,H]
    uint4 const* quantised;  // [rows,H] e4m3
    uint8_t const* scales;   // [rows,H/32], not swizzled
    float const* post;
    float const* comb;
    float const* pre;
    float const* weights;
    int32_t const* index;
    int32_t rows;
    int32_t hidden;
    int32_t topK;
};

// The tensors of one call.
struct Work {
    uint4* x;
    uint4* shared;
    uint4* residual;
    uint4* streams;
    uint4* normed;
    uint4* sum;
    uint4* quantised;
    uint8_t* scales;
    float* post;
    float* comb;
    float* pre;
    float* weights;
    int32_t* index;
    uint64_t scaleBytes;
};

// Where a call finds {first row in the pool, nanoseconds to sleep}: entry `index` of the step that is being run.
struct Place {
    uint2 const* schedule;
    uint32_t const* step;
    uint32_t callsPerStep;
    uint32_t index;
};

enum Checks : uint32_t { kStreams = 1, kNormed = 2, kSum = 4, kQuantised = 8 };

struct Result {
    unsigned long long checkedRows;
    unsigned long long mismatches;  // 16-byte words, or bytes of scales
    uint32_t firstTaken;
    uint32_t step;
    uint32_t call;
    uint32_t row;
    uint32_t what;
    uint32_t word;
};

namespace {

__device__ uint2 placeOf(Place const& place) {
    return place.schedule[static_cast<uint64_t>(*place.step) * place.callsPerStep + place.index];
}

template <typename T>
__device__ void copyRow(T* target, T const* source, int row, int from, int length) {
    for (int i = static_cast<int>(threadIdx.x); i < length; i += static_cast<int>(blockDim.x))
        target[static_cast<int64_t>(row) * length + i] = source[static_cast<int64_t>(from) * length + i];
}

__device__ void poisonRow(uint4* target, int row, int length) {
    for (int i = static_cast<int>(threadIdx.x); i < length; i += static_cast<int>(blockDim.x))
        target[static_cast<int64_t>(row) * length + i] = make_uint4(~0u, ~0u, ~0u, ~0u);
}

__device__ void mismatch(Result* result, Place const& place, uint32_t row, uint32_t what, uint32_t word) {
    atomicAdd(&result->mismatches, 1ull);
    if (atomicCAS(&result->firstTaken, 0u, 1u) == 0u) {
        result->step = *place.step;
        result->call = place.index;
        result->row = row;
        result->what = what;
        result->word = word;
    }
}

__device__ void checkRow(
    Result* result, Place const& place, uint32_t what, uint4 const* found, uint4 const* expected, int row, int from,
    int length) {
    for (int i = static_cast<int>(threadIdx.x); i < length; i += static_cast<int>(blockDim.x)) {
        uint4 const a = found[static_cast<int64_t>(row) * length + i];
        uint4 const b = expected[static_cast<int64_t>(from) * length + i];
        if (a.x != b.x || a.y != b.y || a.z != b.z || a.w != b.w)
            mismatch(result, place, static_cast<uint32_t>(row), what, static_cast<uint32_t>(i));
    }
}

}  // namespace

// One CTA a row: other inputs, poison in everything that the call must write or must not read.
extern "C" __global__ void prepareKernel(Pool pool, Work work, Place place, int finalize) {
    uint2 const entry = placeOf(place);
    int const row = static_cast<int>(blockIdx.x);
    if (row == 0 && threadIdx.x == 0 && entry.y > 0)
        sleepFor(entry.y);
    int const from = static_cast<int>((entry.x + row) % pool.rows);
    int const words = pool.hidden / 8;
    if (finalize) {
        copyRow(work.shared, pool.shared, row, from, words);
        copyRow(work.weights, pool.weights, row, from, pool.topK);
        copyRow(work.index, pool.index, row, from, pool.topK);
        poisonRow(work.x, row, words);
    } else {
        copyRow(work.x, pool.x, row, from, words);
        poisonRow(work.shared, row, words);
    }
    copyRow(work.residual, pool.residual, row, from, 4 * words);
    copyRow(work.post, pool.post, row, from, 4);
    copyRow(work.comb, pool.comb, row, from, 16);
    copyRow(work.pre, pool.pre, row, from, 4);
    poisonRow(work.streams, row, 4 * words);
    poisonRow(work.normed, row, words);
    poisonRow(work.sum, row, words);
    poisonRow(work.quantised, row, words / 2);
    for (uint64_t i = static_cast<uint64_t>(row) * blockDim.x + threadIdx.x; i < work.scaleBytes;
         i += static_cast<uint64_t>(gridDim.x) * blockDim.x)
        work.scales[i] = 0xFF;
}

// One CTA a row: every output of the call, bit for bit.
extern "C" __global__ void checkKernel(Pool pool, Work work, Place place, uint32_t checks, Result* result) {
    uint2 const entry = placeOf(place);
    int const row = static_cast<int>(blockIdx.x);
    int const from = static_cast<int>((entry.x + row) % pool.rows);
    int const words = pool.hidden / 8;
    if (checks & kStreams)
        checkRow(result, place, kStreams, work.streams, pool.streams, row, from, 4 * words);
    if (checks & kNormed)
        checkRow(result, place, kNormed, work.normed, pool.normed, row, from, words);
    if (checks & kSum)
        checkRow(result, place, kSum, work.sum, pool.sum, row, from, words);
    if (checks & kQuantised) {
        checkRow(result, place, kQuantised, work.quantised, pool.quantised, row, from, words / 2);
        // Swizzled in tiles of 128 rows and 4 columns; rows that pad the last tile have scale 0.
        int const columns = pool.hidden / 32;
        int const last = row + 1 == static_cast<int>(gridDim.x) ? (row / 128 + 1) * 128 : row + 1;
        for (int r = row; r < last; ++r) {
            for (int g = static_cast<int>(threadIdx.x); g < columns; g += static_cast<int>(blockDim.x)) {
                int64_t const at = static_cast<int64_t>(r / 128) * 128 * columns + g / 4 * 512 + r % 32 * 16 +
                                   r % 128 / 32 * 4 + g % 4;
                uint8_t const expected = r == row ? pool.scales[static_cast<int64_t>(from) * columns + g] : 0;
                if (work.scales[at] != expected)
                    mismatch(result, place, static_cast<uint32_t>(r), 16, static_cast<uint32_t>(g));
            }
        }
    }
    if (threadIdx.x == 0)
        atomicAdd(&result->checkedRows, 1ull);
}

extern "C" __global__ void advanceKernel(uint32_t* step) {
    ++*step;
}
