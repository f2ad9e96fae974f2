// SPDX-License-Identifier: Apache-2.0
//
// The kernels themselves, on a processor (emulation.h): values bit for bit, what they leave behind in the mailbox, and
// what they do when something is wrong.
#include "emulation.h"

// The sources of the kernels.
#include "boundary_kernel.cuh"
#include "coefficients.cu"
#include "publish.cu"

#include <gtest/gtest.h>

extern "C" cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, void const*) {
    return cudaSuccess;
}

namespace mhc {
namespace {

constexpr int kHidden = 4096;
constexpr int kCapacity = 4;
constexpr float kEps = 1e-6F;

using Half = uint16_t;

float widen(Half v) {
    return emulation::bits<float>(static_cast<uint32_t>(v) << 16);
}

Half round(float v) {
    uint32_t const bits = emulation::bits<uint32_t>(v);
    if (v != v)
        return 0x7FC0;
    return static_cast<Half>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

// Device memory: aligned for 16-byte access.
template <typename T>
class Array {
public:
    explicit Array(size_t size, T value = T{})
        : size_(size), memory_(static_cast<T*>(std::aligned_alloc(256, bytes()))) {
        std::fill(data(), data() + size, value);
    }
    ~Array() { std::free(memory_); }
    Array(Array const&) = delete;
    T* data() const { return memory_; }
    T& operator[](size_t i) const { return memory_[i]; }
    size_t size() const { return size_; }
    template <typename To>
    To* as() const {
        return reinterpret_cast<To*>(memory_);
    }

private:
    size_t bytes() const { return (size_ * sizeof(T) + 255) / 256 * 256; }
    size_t size_;
    T* memory_;
};

std::mt19937 generator(7);

void randomize(Array<Half> const& array) {
    std::normal_distribution<float> normal;
    for (size_t i = 0; i < array.size(); ++i)
        array[i] = generator() % 16 == 0 ? Half{0x8000} : round(normal(generator));
}

void randomize(Array<float> const& array) {
    std::normal_distribution<float> normal;
    for (size_t i = 0; i < array.size(); ++i)
        array[i] = normal(generator);
}

// One rank's memory and its stream.
struct Rank {
    Array<Half> slots;
    Array<uint32_t> headers;
    LaneState lane{};
    Array<RowState> rows{kCapacity};
    mhcErrorRecord record{};
    emulation::Stream stream;
    Mailbox box{};
    explicit Rank(int tp)
        : slots(static_cast<size_t>(kGenerations) * tp * kCapacity * kHidden, 0x8000),
          headers(static_cast<size_t>(kGenerations) * tp * kCapacity * 4, kFillWord) {}

    // Until rank 0's first call has stored so many rows here.
    void awaitRows(int count) const {
        for (size_t i = 0; i < static_cast<size_t>(count) * kHidden; ++i) {
            while (__atomic_load_n(slots.data() + i, __ATOMIC_RELAXED) == 0x8000)
                std::this_thread::yield();
        }
    }
};

struct Group {
    std::vector<std::unique_ptr<Rank>> ranks;
    explicit Group(int tp, double timeoutSeconds = 60) {
        for (int r = 0; r < tp; ++r)
            ranks.push_back(std::make_unique<Rank>(tp));
        for (int r = 0; r < tp; ++r) {
            Mailbox& box = ranks[r]->box;
            for (int s = 0; s < tp; ++s) {
                box.slots[s] = ranks[s]->slots.as<uint4>();
                box.headers[s] = ranks[s]->headers.as<uint4>();
            }
            box.state = &ranks[r]->lane;
            box.rows = ranks[r]->rows.data();
            box.record = &ranks[r]->record;
            box.timeoutNanoseconds = static_cast<uint64_t>(timeoutSeconds * 1e9);
            box.rank = r;
            box.tpSize = tp;
            box.capacity = kCapacity;
            box.hiddenSize = kHidden;
        }
    }
    void synchronize() const {
        for (auto const& rank : ranks)
            rank->stream.synchronize();
    }
    // Nothing is left of the calls but their number.
    void expectClean(std::vector<uint32_t> const& calls) const {
        for (auto const& rank : ranks) {
            EXPECT_EQ(rank->lane.error, 0u);
            EXPECT_EQ(rank->lane.begun, 0u);
            for (size_t t = 0; t < calls.size(); ++t) {
                EXPECT_EQ(rank->rows[t].next, calls[t]);
                EXPECT_EQ(rank->rows[t].ticket, 0u);
                EXPECT_EQ(rank->rows[t].operation, 0u);
            }
            for (size_t i = 0; i < rank->slots.size(); ++i)
                ASSERT_EQ(rank->slots[i], 0x8000) << i;
            for (size_t i = 0; i < rank->headers.size(); ++i)
                ASSERT_EQ(rank->headers[i], kFillWord) << i;
        }
    }
};

// One call's tensors on all ranks.
struct Step {
    int rows;
    std::vector<std::unique_ptr<Array<Half>>> x, residualOut, layerInput;
    Array<Half> residual, gamma{kHidden};
    Array<float> post, comb, pre;
    Step(int tp, int m)
        : rows(m),
          residual(static_cast<size_t>(m) * MHC_STREAMS * kHidden),
          post(static_cast<size_t>(m) * MHC_STREAMS),
          comb(static_cast<size_t>(m) * MHC_STREAMS * MHC_STREAMS),
          pre(static_cast<size_t>(m) * MHC_STREAMS) {
        for (int r = 0; r < tp; ++r) {
            x.push_back(std::make_unique<Array<Half>>(static_cast<size_t>(m) * kHidden));
            residualOut.push_back(std::make_unique<Array<Half>>(residual.size(), 0x7FFF));
            layerInput.push_back(std::make_unique<Array<Half>>(static_cast<size_t>(m) * kHidden, 0x7FFF));
            randomize(*x.back());
        }
        randomize(residual);
        randomize(gamma);
        randomize(post);
        randomize(comb);
        randomize(pre);
    }

    BoundaryArgs args(
        int rank, uint32_t owner, Published published = Published::kPlain,
        Consumer consumer = Consumer::kBoundary) const {
        BoundaryArgs args{};
        if (published == Published::kByProducer)
            consumer = Consumer::kUnknown;
        args.chunk = {0, rows, rows, owner, operationWord(published, consumer)};
        args.x = x[rank]->as<uint4>();
        args.residual = residual.as<uint4>();
        args.post = post.data();
        args.comb = comb.data();
        args.pre = pre.data();
        args.gamma = gamma.as<uint4>();
        args.eps = kEps;
        args.residualOut = residualOut[rank]->as<uint4>();
        args.layerInput = layerInput[rank]->as<uint4>();
        args.publishedByProducer = published == Published::kByProducer ? 1 : 0;
        return args;
    }

    // The arithmetic of contract 1.2, one element after the other; the sum of squares in the order of rms_norm.cuh.
    void expectRight(Consumer consumer = Consumer::kBoundary) const {
        int const tp = static_cast<int>(x.size());
        for (int t = 0; t < rows; ++t) {
            std::vector<Half> streams(static_cast<size_t>(MHC_STREAMS) * kHidden), collapsed(kHidden);
            for (int h = 0; h < kHidden; ++h) {
                float sum = 0;
                for (int r = 0; r < tp; ++r) {
                    Half const v = (*x[r])[static_cast<size_t>(t) * kHidden + h];
                    sum = r == 0 ? widen(v == 0x8000 ? Half{0} : v) : sum + widen(v == 0x8000 ? Half{0} : v);
                }
                float const reduced = widen(round(sum));
                for (int r = 0; consumer == Consumer::kAllReduce && r < tp; ++r)
                    ASSERT_EQ((*residualOut[r])[static_cast<size_t>(t) * kHidden + h], round(sum)) << "rank " << r;
                float collapse = 0;
                for (int i = 0; i < MHC_STREAMS; ++i) {
                    float stream = reduced * post[t * MHC_STREAMS + i];
                    for (int j = 0; j < MHC_STREAMS; ++j) {
                        stream = std::fma(
                            widen(residual[(static_cast<size_t>(t) * MHC_STREAMS + j) * kHidden + h]),
                            comb[(t * MHC_STREAMS + j) * MHC_STREAMS + i], stream);
                    }
                    Half const rounded = round(stream);
                    streams[static_cast<size_t>(i) * kHidden + h] = rounded;
                    collapse = std::fma(widen(rounded), pre[t * MHC_STREAMS + i], collapse);
                }
                collapsed[h] = round(collapse);
            }
            if (consumer == Consumer::kAllReduce)
                continue;
            float total = 0;
            for (int group = 0; group < kHidden / 256; ++group) {
                float lanes[32];
                for (int lane = 0; lane < 32; ++lane) {
                    lanes[lane] = 0;
                    for (int e = 0; e < 8; ++e) {
                        float const v = widen(collapsed[group * 256 + lane * 8 + e]);
                        lanes[lane] = std::fma(v, v, lanes[lane]);
                    }
                }
                for (int distance = 16; distance > 0; distance /= 2) {
                    for (int lane = 0; lane < distance; ++lane)
                        lanes[lane] += lanes[lane + distance];
                }
                total = group == 0 ? lanes[0] : total + lanes[0];
            }
            float const inverse = __frsqrt_rn(total / static_cast<float>(kHidden) + kEps);
            for (int r = 0; r < tp; ++r) {
                for (int i = 0; i < MHC_STREAMS * kHidden; ++i)
                    ASSERT_EQ((*residualOut[r])[static_cast<size_t>(t) * MHC_STREAMS * kHidden + i], streams[i])
                        << "rank " << r << " row " << t << " element " << i;
                for (int h = 0; consumer == Consumer::kBoundary && h < kHidden; ++h)
                    ASSERT_EQ(
                        (*layerInput[r])[static_cast<size_t>(t) * kHidden + h],
                        round(widen(collapsed[h]) * inverse * widen(gamma[h])))
                        << "rank " << r << " row " << t << " element " << h;
            }
        }
    }

    void expectNaN(int rank) const {
        for (Array<Half> const* out : {residualOut[rank].get(), layerInput[rank].get()}) {
            for (size_t i = 0; i < out->size(); ++i)
                ASSERT_NE(widen((*out)[i]), widen((*out)[i])) << i;
        }
    }
};

constexpr int kRowCtas = kHidden / kElementsPerCta;

// An instance: a row is kCtas CTAs of kCtaThreads threads, or any number of them where there is no norm.
template <
    int kTp, Source kSource, Consumer kConsumer = Consumer::kBoundary, int kCtas = kRowCtas, int kCtaThreads = kThreads>
void launchBoundaryOf(Mailbox const& box, BoundaryArgs const& args, emulation::Stream& stream) {
    constexpr int kGridCtas = kCtas > 0 ? kCtas : kRowCtas;
    launchKernel(
        boundaryKernel<kTp, kSource, kConsumer, kCtas, kCtaThreads>,
        dim3(kGridCtas, static_cast<unsigned>(args.chunk.rows)), kCtaThreads, kGridCtas, Launch::kOverlapped,
        stream.handle(), box, args);
}

template <int kTp>
void exchange(Group const& group, Step const& call, int rank, uint32_t owner) {
    launchBoundaryOf<kTp, Source::kExchange>(group.ranks[rank]->box, call.args(rank, owner), group.ranks[rank]->stream);
}

// Calls of the given rows, all enqueued at once by `enqueue(group, call, rank, number)`; then looks at their results,
// and at the mailbox.
template <typename Enqueue>
void chain(int tp, std::vector<int> const& rows, Enqueue enqueue) {
    Group group(tp);
    std::vector<std::unique_ptr<Step>> calls;
    std::vector<uint32_t> callsOfRow(kCapacity);
    for (int m : rows) {
        auto const number = static_cast<uint32_t>(calls.size());
        calls.push_back(std::make_unique<Step>(tp, m));
        for (int r = 0; r < tp; ++r)
            enqueue(group, *calls.back(), r, number);
        for (int t = 0; t < m; ++t)
            ++callsOfRow[static_cast<size_t>(t)];
    }
    group.synchronize();
    for (auto const& call : calls)
        call->expectRight();
    group.expectClean(callsOfRow);
}

template <int kTp>
void exchangeChain() {
    chain(kTp, {1, 3, 2, 1, 3}, [](Group const& group, Step const& call, int rank, uint32_t number) {
        exchange<kTp>(group, call, rank, 1 + number);
    });
}

TEST(Kernels, ExchangesOfTwoRanks) {
    exchangeChain<2>();
}

TEST(Kernels, ExchangesOfFourRanks) {
    exchangeChain<4>();
}

TEST(Kernels, ExchangesOfEightRanks) {
    exchangeChain<8>();
}

template <Consumer kConsumer, int kCtas, int kCtaThreads>
void oneExchange() {
    Group group(2);
    Step const call(2, 2);
    for (int r = 0; r < 2; ++r)
        launchBoundaryOf<2, Source::kExchange, kConsumer, kCtas, kCtaThreads>(
            group.ranks[r]->box, call.args(r, 5, Published::kPlain, kConsumer), group.ranks[r]->stream);
    group.synchronize();
    call.expectRight(kConsumer);
    group.expectClean({1, 1});
}

TEST(Kernels, ARowInTwoCtas) {
    oneExchange<Consumer::kBoundary, kManyRowsCtas, kHidden / kFragment / kManyRowsCtas>();
}

TEST(Kernels, AllReduce) {
    oneExchange<Consumer::kAllReduce, 0, kThreads>();
}

TEST(Kernels, ResidualOnly) {
    oneExchange<Consumer::kResidualOnly, 0, kThreads>();
}

TEST(Kernels, OneRankAlone) {
    Group group(1);
    Step call(1, 2);
    for (size_t i = 0; i < call.x[0]->size(); ++i) {
        if ((*call.x[0])[i] == 0x8000)
            (*call.x[0])[i] = 0;  // only the mailbox knows no -0
    }
    launchBoundaryOf<1, Source::kLocal>(group.ranks[0]->box, call.args(0, 6), group.ranks[0]->stream);
    group.synchronize();
    call.expectRight();
}

TEST(Kernels, PublishAndConsumer) {
    chain(2, {2, 1, 2}, [](Group const& group, Step const& call, int r, uint32_t number) {
        Rank& rank = *group.ranks[r];
        BoundaryArgs args = call.args(r, 1 + number);
        args.preload = 1;
        launchPublish(rank.box, args.x, args.chunk, Launch::kOverlapped, rank.stream.handle());
        launchBoundaryOf<2, Source::kMailbox>(rank.box, args, rank.stream);
    });
}

// Exchanges and calls of two kernels on one lane, headers behind their rows, and the gate before the consumer.
TEST(Kernels, EveryWayInTurn) {
    chain(2, {1, 2, 1, 2, 1, 2}, [](Group const& group, Step const& call, int r, uint32_t number) {
        Rank& rank = *group.ranks[r];
        if (number % 3 == 0) {
            exchange<2>(group, call, r, 1 + number);
            return;
        }
        Mailbox box = rank.box;
        box.headerLast = number % 3 == 1;
        BoundaryArgs const args = call.args(r, 1 + number);
        launchPublish(box, args.x, args.chunk, Launch::kOverlapped, rank.stream.handle());
        if (box.headerLast)
            launchGate(box, args.chunk, rank.stream.handle());
        launchBoundaryOf<2, Source::kMailbox>(box, args, rank.stream);
    });
}

// A producer that stores rows itself; only the rest of the publish is ours.
TEST(Kernels, RowsOfAProducer) {
    Group group(2);
    Step const call(2, 2);
    for (int r = 0; r < 2; ++r) {
        for (int to = 0; to < 2; ++to) {
            for (size_t i = 0; i < call.x[r]->size(); ++i) {
                Half const v = (*call.x[r])[i];
                size_t const at = slotOffset(
                    group.ranks[r]->box, 0, r, static_cast<int>(i / kHidden), static_cast<int>(i % kHidden) / 8);
                group.ranks[to]->slots[at * 8 + i % 8] = v == 0x8000 ? Half{0} : v;
            }
        }
    }
    for (int r = 0; r < 2; ++r) {
        Rank& rank = *group.ranks[r];
        BoundaryArgs args = call.args(r, 31, Published::kByProducer);
        launchMarkPublished(rank.box, args.chunk, rank.stream.handle());
        args.chunk.owner = 32;
        launchBoundaryOf<2, Source::kMailbox>(rank.box, args, rank.stream);
    }
    group.synchronize();
    call.expectRight();
    group.expectClean({1, 1});
}

// The MoE's sum in the place of x: routes in order, one rounding.
struct Routes {
    static constexpr int kTop = 3;
    static constexpr int kPermuted = 5;
    Array<Half> permuted{static_cast<size_t>(kPermuted) * kHidden}, shared;
    Array<float> weights;
    Array<int32_t> index;
    Routes(Step const& call, int rank)
        : shared(call.x[rank]->size()),
          weights(static_cast<size_t>(call.rows) * kTop),
          index(static_cast<size_t>(call.rows) * kTop) {
        randomize(permuted);
        randomize(shared);
        randomize(weights);
        for (size_t i = 0; i < index.size(); ++i)
            index[i] = static_cast<int32_t>(generator() % (kPermuted + 1)) - 1;
        for (size_t i = 0; i < shared.size(); ++i) {
            float sum = 0;
            for (int k = 0; k < kTop; ++k) {
                size_t const route = i / kHidden * kTop + k;
                if (index[route] >= 0)
                    sum = std::fma(
                        widen(permuted[static_cast<size_t>(index[route]) * kHidden + i % kHidden]), weights[route],
                        sum);
            }
            (*call.x[rank])[i] = round(sum + widen(shared[i]));
        }
    }
    BoundaryArgs args(Step const& call, int rank, uint32_t owner) const {
        BoundaryArgs args = call.args(rank, owner, Published::kFinalize);
        args.x = nullptr;
        args.finalize = {permuted.as<uint4>(), weights.data(), index.data(), shared.as<uint4>(), kTop, kPermuted};
        return args;
    }
};

TEST(Kernels, FinalizeIsThePlainCallOnItsSum) {
    Group group(2);
    Step const call(2, 2);
    Routes const routes[] = {{call, 0}, {call, 1}};
    for (int r = 0; r < 2; ++r)
        launchBoundaryOf<2, Source::kExchange>(
            group.ranks[r]->box, routes[r].args(call, r, 91), group.ranks[r]->stream);
    group.synchronize();
    call.expectRight();
    group.expectClean({1, 1});
}

// The rank that has it stops; the row is NaN everywhere, and the call ends on every rank.
TEST(Kernels, AnIndexOutsideItsTensor) {
    Group group(2);
    Step const call(2, 2);
    Routes const routes[] = {{call, 0}, {call, 1}};
    routes[0].index[1] = Routes::kPermuted;
    for (int r = 0; r < 2; ++r)
        launchBoundaryOf<2, Source::kExchange>(
            group.ranks[r]->box, routes[r].args(call, r, 95), group.ranks[r]->stream);
    group.synchronize();
    mhcErrorRecord const& record = group.ranks[0]->record;
    EXPECT_EQ(record.kind, static_cast<uint32_t>(MHC_ERROR_INDEX));
    EXPECT_EQ(record.token, 0);
    EXPECT_EQ(record.got, static_cast<uint32_t>(Routes::kPermuted));
    EXPECT_EQ(group.ranks[1]->record.kind, static_cast<uint32_t>(MHC_ERROR_NONE));
    for (int r = 0; r < 2; ++r) {
        for (int h = 0; h < kHidden; ++h)
            ASSERT_NE(widen((*call.layerInput[r])[h]), widen((*call.layerInput[r])[h]));
    }
}

TEST(Kernels, Mxfp8) {
    for (int rows : {1, 3}) {
        constexpr int kBlocks = kHidden / kScaleBlock;
        Group group(2);
        Step const call(2, rows);
        Array<uint8_t> const data(static_cast<size_t>(rows) * kHidden, 0xEE);
        Array<uint8_t> const scales(static_cast<size_t>(kScaleTileRows) * kBlocks, 0xFF);
        for (int r = 0; r < 2; ++r) {
            BoundaryArgs args = call.args(r, 99);
            if (r == 0) {
                args.quantised = data.as<uint2>();
                args.scales = scales.data();
            }
            launchBoundaryOf<2, Source::kExchange>(group.ranks[r]->box, args, group.ranks[r]->stream);
        }
        group.synchronize();
        call.expectRight();
        for (int row = 0; row < kScaleTileRows; ++row) {
            for (int block = 0; block < kBlocks; ++block) {
                // contract 1.6
                int exponent = 0;
                if (row < rows) {
                    float largest = 0;
                    for (int i = 0; i < kScaleBlock; ++i)
                        largest = std::fmax(
                            largest, std::fabs(widen((*call.layerInput[0])[row * kHidden + block * kScaleBlock + i])));
                    float const n = largest * (1.0F / 448.0F);
                    exponent = n > 0 ? static_cast<int>(std::ceil(std::log2(static_cast<double>(n)))) + 127 : 0;
                    for (int i = 0; i < kScaleBlock; ++i) {
                        int const at = row * kHidden + block * kScaleBlock + i;
                        float const scaled = std::ldexp(widen((*call.layerInput[0])[at]), 127 - exponent);
                        ASSERT_EQ(data[at], __nv_cvt_float_to_fp8(scaled, __NV_SATFINITE, __NV_E4M3)) << at;
                    }
                }
                int const at = block / 4 * 512 + row % 32 * 16 + row / 32 * 4 + block % 4;
                ASSERT_EQ(scales[at], exponent) << "row " << row << " block " << block;
            }
        }
    }
}

TEST(Kernels, ALaneUsedFromTwoStreamsAtOnce) {
    Group group(2);
    Step const first(2, 2);
    Step const second(2, 2);
    emulation::Stream other;
    exchange<2>(group, first, 0, 41);  // waits for its peer
    group.ranks[1]->awaitRows(first.rows);
    launchBoundaryOf<2, Source::kExchange>(group.ranks[0]->box, second.args(0, 42), other);
    other.synchronize();
    group.synchronize();
    EXPECT_EQ(group.ranks[0]->record.kind, static_cast<uint32_t>(MHC_ERROR_TICKET));
    first.expectNaN(0);
    second.expectNaN(0);
    // The second has stored nothing at the peer: what is there are the first's rows.
    for (size_t i = 0; i < first.x[0]->size(); ++i) {
        Half const v = (*first.x[0])[i];
        ASSERT_EQ(group.ranks[1]->slots[i], v == 0x8000 ? Half{0} : v) << i;
    }
}

TEST(Kernels, APendingPublishIsFound) {
    Group group(2);
    Step const call(2, 1);
    BoundaryArgs const args = call.args(0, 51);
    launchPublish(group.ranks[0]->box, args.x, args.chunk, Launch::kOverlapped, group.ranks[0]->stream.handle());
    exchange<2>(group, call, 0, 52);
    group.synchronize();
    // Which of the two finds the other depends on how early the second is there.
    EXPECT_EQ(group.ranks[0]->record.kind, static_cast<uint32_t>(MHC_ERROR_TICKET));
    call.expectNaN(0);
}

TEST(Kernels, AConsumerWithoutAPublish) {
    Group group(2);
    Step const call(2, 1);
    launchBoundaryOf<2, Source::kMailbox>(group.ranks[0]->box, call.args(0, 61), group.ranks[0]->stream);
    group.synchronize();
    EXPECT_EQ(group.ranks[0]->record.kind, static_cast<uint32_t>(MHC_ERROR_NOT_PUBLISHED));
    call.expectNaN(0);
}

TEST(Kernels, RanksInDifferentCalls) {
    Group group(2);
    Step const one(2, 1);
    Step const two(2, 2);
    exchange<2>(group, one, 0, 71);
    exchange<2>(group, two, 1, 71);
    group.synchronize();
    for (int r = 0; r < 2; ++r) {
        EXPECT_EQ(group.ranks[r]->record.kind, static_cast<uint32_t>(MHC_ERROR_HEADER_MISMATCH));
        EXPECT_EQ(group.ranks[r]->record.rank, 1 - r);
        EXPECT_EQ(group.ranks[r]->rows[0].next, 0u);
    }
    one.expectNaN(0);
    two.expectNaN(1);
}

TEST(Kernels, APeerThatNeverComes) {
    Group group(2, 0.3);
    Step const call(2, 2);
    Step const next(2, 1);
    exchange<2>(group, call, 0, 81);
    exchange<2>(group, next, 0, 82);
    group.synchronize();
    EXPECT_EQ(group.ranks[0]->record.kind, static_cast<uint32_t>(MHC_ERROR_TIMEOUT));
    EXPECT_EQ(group.ranks[0]->record.rank, 1);
    call.expectNaN(0);
    next.expectNaN(0);
}

TEST(Coefficients, SumsAreThoseOfTheButterfly) {
    constexpr int kFeatures = MHC_STREAMS * kHidden;
    constexpr int kGroups = kFeatures / kGroupElements;
    for (int rows : {3, 6}) {
        Array<Half> const x(static_cast<size_t>(rows) * kFeatures);
        Array<float> const fn(static_cast<size_t>(kCoefficients) * kFeatures);
        Array<float> const scale(3, 0.5F), base(kCoefficients, 0.25F);
        Array<float> const partial(coefficientsPartialBytes(rows, kFeatures) / sizeof(float));
        Array<float> const post(static_cast<size_t>(rows) * 4), pre(static_cast<size_t>(rows) * 4);
        Array<float> const comb(static_cast<size_t>(rows) * 16);
        randomize(x);
        randomize(fn);
        emulation::Stream stream;
        CoefficientsInput const input{x.as<uint4>(), fn.data(),   scale.data(), base.data(), partial.data(),
                                      rows,          kFeatures,   20,           kEps,        1e-6F,
                                      2.0F,          post.data(), comb.data(),  pre.data()};
        launchCoefficients(input, stream.handle());
        stream.synchronize();
        for (int t = 0; t < rows; ++t) {
            double logits[kSums] = {};
            for (int row = 0; row < kSums; ++row) {
                float sum = 0;
                for (int group = 0; group < kGroups; ++group) {
                    float lanes[32];
                    for (int lane = 0; lane < 32; ++lane) {
                        lanes[lane] = 0;
                        for (int e = 0; e < 8; ++e) {
                            int const at = group * kGroupElements + lane * 8 + e;
                            float const v = widen(x[static_cast<size_t>(t) * kFeatures + at]);
                            float const w = row < kCoefficients ? fn[static_cast<size_t>(row) * kFeatures + at] : v;
                            lanes[lane] = std::fma(v, w, lanes[lane]);
                        }
                    }
                    for (int distance = 16; distance > 0; distance /= 2) {
                        for (int lane = 0; lane < distance; ++lane)
                            lanes[lane] += lanes[lane + distance];
                    }
                    size_t const at = (static_cast<size_t>(t) * kSums + row) * kGroups + group;
                    ASSERT_EQ(partial[at], lanes[0]) << "token " << t << " row " << row << " group " << group;
                    sum += lanes[0];
                }
                logits[row] = sum;
            }
            double const inverse = 1 / std::sqrt(logits[kCoefficients] / kFeatures + kEps);
            for (int i = 0; i < MHC_STREAMS; ++i) {
                auto const sigmoid = [&](int row) { return 1 / (1 + std::exp(-(logits[row] * inverse * 0.5 + 0.25))); };
                EXPECT_NEAR(pre[t * 4 + i], sigmoid(i) + 1e-6, 1e-6);
                EXPECT_NEAR(post[t * 4 + i], 2 * sigmoid(MHC_STREAMS + i), 1e-6);
                // Columns are normalised last.
                EXPECT_NEAR(
                    comb[t * 16 + i] + comb[t * 16 + 4 + i] + comb[t * 16 + 8 + i] + comb[t * 16 + 12 + i], 1, 1e-5);
            }
        }
    }
}

}  // namespace
}  // namespace mhc
