// SPDX-License-Identifier: Apache-2.0
//
// The C interface of mhc: the fused all-reduce + mHC boundary of DeepSeek V4.1 over a peer-to-peer mailbox.
//
// Conventions. Every function returns an mhcStatus; mhcLastError() then holds the sentence for the calling thread.
// Tensors are contiguous device pointers, 16-byte aligned (fp32 mixes: 4-byte aligned). M = rows (tokens) of the call,
// H = hidden size, hc = 4 residual streams. Streams are cudaStream_t, passed as void* so that C callers need no CUDA
// header. Functions marked "collective" return only when every rank of the group has called them, or with MHC_TIMEOUT.
#ifndef MHC_MHC_H
#define MHC_MHC_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define MHC_API __attribute__((visibility("default")))
#else
#define MHC_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define MHC_MAX_RANKS 8
#define MHC_STREAMS 4     // hc: the number of residual streams
#define MHC_MAX_GROUP 64  // world ranks that a group list may hold

typedef enum mhcStatus {
    MHC_SUCCESS = 0,
    MHC_INVALID_ARGUMENT = 1,
    MHC_CUDA_ERROR = 2,
    MHC_TIMEOUT = 3,        // a collective host call: a rank did not come in time
    MHC_MAILBOX_ERROR = 4,  // the lane's error record is set; only mhcCommReset clears it
    MHC_NOT_BOUND = 5,      // no communicator for this group and device
    MHC_UNSUPPORTED = 6,
    MHC_PEER_FAILED = 7,        // a collective host call: another rank reported a failure
    MHC_CAPTURE_NOT_READY = 8,  // capturing before the group has met
    MHC_NCCL_ERROR = 9          // a call of NCCL failed
} mhcStatus;

// What went wrong inside a kernel: the one record of a lane.
typedef enum mhcErrorKind {
    MHC_ERROR_NONE = 0,
    MHC_ERROR_TIMEOUT = 1,          // a contribution did not arrive
    MHC_ERROR_HEADER_MISMATCH = 2,  // a peer came with another M, operation, order or lane
    MHC_ERROR_INDEX = 3,            // a finalize index lies outside gemm2_permuted
    MHC_ERROR_TICKET = 4,           // the lane was in use by another enqueue
    MHC_ERROR_NOT_PUBLISHED = 5,    // a published boundary found nothing published
    MHC_ERROR_NCCL = 6              // an all-reduce through NCCL did not come to its end
} mhcErrorKind;

typedef struct mhcErrorRecord {
    uint32_t kind;        // mhcErrorKind
    int32_t rank;         // the rank waited for, or that sent the other header; -1 where no rank is meant
    int32_t token;        // the row waited for
    uint32_t generation;  // 0, 1, 2
    uint32_t sequence;    // the lane's call number
    uint32_t expected;    // header mismatch: this rank's word; index: rows of the tensor
    uint32_t got;         // header mismatch: the peer's word; index: the index found; NCCL: its result, or 0
    uint32_t field;       // header mismatch: 0 sequence, 1 rows, 2 operation, 3 lane
                          // NCCL: 0 not in time, 1 it reported an error, 2 a graph captured before a reset
} mhcErrorRecord;

typedef enum mhcOnError {
    MHC_ON_ERROR_RAISE = 0,  // outputs become NaN, the next call returns MHC_MAILBOX_ERROR
    MHC_ON_ERROR_TRAP = 1    // the kernel traps: for hosts that would not look at the record
} mhcOnError;

// Who waits for the peers. See docs/architecture.md, "Waiting".
typedef enum mhcWaitMode {
    MHC_WAIT_AUTO = 0,  // gate where ranks share a device, spin elsewhere
    MHC_WAIT_SPIN =
        1,  // every CTA polls for itself; publish and consume are one kernel where all its CTAs are resident
    MHC_WAIT_GATE = 2,  // a one-CTA kernel waits, the consumer follows it
    MHC_WAIT_SPLIT = 3  // as spin, but publish and consume are always two kernels
} mhcWaitMode;

typedef struct mhcComm* mhcComm_t;

// An all-gather among the group's ranks, supplied by the caller: `send` has `bytes` bytes, `receive` has tp_size times
// that, in rank order. Returns 0, or anything else for failure. Called only from within collective functions.
typedef int (*mhcAllGatherFn)(void* context, void const* send, void* receive, size_t bytes);

typedef struct mhcCommConfig {
    uint32_t struct_size;  // sizeof(mhcCommConfig)
    int32_t tp_size;       // 1, 2, 4 or 8
    int32_t rank;          // index in the group, 0 .. tp_size-1
    int32_t device;        // CUDA device ordinal of this rank
    int32_t hidden_size;   // 4096, 5120 or 7168
    int32_t capacity;      // rows of one mailbox slot; larger M goes through in chunks
    int32_t lanes;         // independent mailboxes, 1 .. 64
    int32_t on_error;      // mhcOnError
    int32_t wait_mode;     // mhcWaitMode
    uint32_t timeout_ms;   // of a kernel's wait and of each collective host call; 0 = 60 000
    int32_t group_size;    // number of entries of `group`; 0: the ranks 0 .. tp_size-1
    int32_t const* group;  // world ranks, as in the plugins' `group` attribute
    // A struct_size that ends before these is accepted: they count as 0.
    int32_t nccl_rows;  // M from which on NCCL's all-reduce is used. 0: only where ranks have no peer access to
                        // each other, for every M; -1: never. The same on all ranks
    int32_t nccl_workspace_rows;  // rows that go through NCCL at once, 1 .. 65535; 0 = 2048
} mhcCommConfig;

MHC_API char const* mhcVersion(void);
MHC_API char const* mhcLastError(void);
MHC_API char const* mhcStatusName(mhcStatus status);

// ---- communicator -------------------------------------------------------------------------------------------------

// Collective. Ranks are threads of this process; `name` says which of them belong together.
MHC_API mhcStatus mhcCommCreateThreads(mhcComm_t* comm, mhcCommConfig const* config, char const* name);
// Collective. Ranks meet through the caller's all-gather (mpi4py, torch.distributed, multiprocessing, ...).
MHC_API mhcStatus
mhcCommCreateAllGather(mhcComm_t* comm, mhcCommConfig const* config, mhcAllGatherFn allGather, void* context);
// One rank that plays its whole group: what it stores for a peer lands in its own mailbox as that peer's contribution,
// so that all contributions equal its own. For measurements without a link and for sanitizers; `rank` is 0.
MHC_API mhcStatus mhcCommCreateSelfLoop(mhcComm_t* comm, mhcCommConfig const* config);
// Collective. Ranks meet through `ncclComm`, an ncclComm_t of exactly the group's ranks, in the group's order, made by
// whoever else uses NCCL in this process (TensorRT-LLM, Triton, torch). It stays the caller's, carries only what the
// ranks tell each other in collective functions, and must outlive the communicator; nobody else may use it during them.
// Where it blocks the host, NCCL's own setting up is not bounded by timeout_ms.
MHC_API mhcStatus mhcCommCreateNccl(mhcComm_t* comm, mhcCommConfig const* config, void* ncclComm);
// Collective. Ranks are processes that a launcher has started (torchrun, mpirun, srun, or anything that sets
// TRTLLM_MHC_RANK and TRTLLM_MHC_WORLD_SIZE), and meet where the environment variables of docs/ranks.md say; or
// threads, with TRTLLM_MHC_RENDEZVOUS=threads. From the variables come: rank and device where they are -1; capacity,
// timeout_ms and nccl_rows where they are 0; on_error where it is -1 (trap unless TRTLLM_MHC_ON_ERROR=raise).
// MHC_NOT_BOUND: there are none.
MHC_API mhcStatus mhcCommCreateEnvironment(mhcComm_t* comm, mhcCommConfig const* config);
// Collective unless the lanes are in error. Waits for the device's work, then frees.
MHC_API mhcStatus mhcCommDestroy(mhcComm_t comm);
// Collective: quiesces, refills every lane, forgets errors, tickets and pending publishes.
MHC_API mhcStatus mhcCommReset(mhcComm_t comm);
// MHC_SUCCESS, or MHC_MAILBOX_ERROR with the record of the first lane in error (lane < 0: any lane).
MHC_API mhcStatus mhcCommStatus(mhcComm_t comm, int32_t lane, mhcErrorRecord* record);

// What carries the contributions, decided by all ranks when the group is made.
typedef enum mhcTransport {
    MHC_TRANSPORT_LOCAL = 0,         // one rank: nothing is carried
    MHC_TRANSPORT_MAILBOX = 1,       // the mailbox, for every M
    MHC_TRANSPORT_MAILBOX_NCCL = 2,  // the mailbox, and NCCL for M of nccl_rows and more
    MHC_TRANSPORT_NCCL = 3           // NCCL, for every M
} mhcTransport;

#define MHC_REASON_BYTES 192

typedef struct mhcCommInfo {
    uint32_t struct_size;
    int32_t tp_size, rank, device, hidden_size, capacity, lanes;
    int32_t ranks_per_device;  // the group's maximum
    int32_t waits_at_gate;     // 1: mhcWaitMode resolved to the gate
    int32_t exchange_rows;     // up to which publish and consume are one kernel; 0 = never
    int32_t multicast;         // 1: NVLink multicast is used
    size_t mailbox_bytes;      // of this rank, all lanes
    // A struct_size that ends before these is accepted.
    int32_t transport;                        // mhcTransport
    int32_t nccl_rows;                        // M from which on NCCL is used; 0 = never
    int32_t nccl_workspace_rows;              // rows that go through NCCL at once; 0 = NCCL is not used
    int32_t nccl_version;                     // as NCCL counts, 22809 is 2.28.9; 0 = NCCL is not used
    char transport_reason[MHC_REASON_BYTES];  // a sentence that ends
} mhcCommInfo;
MHC_API mhcStatus mhcCommGetInfo(mhcComm_t comm, mhcCommInfo* info);

// How one rank reaches another's memory.
typedef enum mhcReach {
    MHC_REACH_NONE = 0,
    MHC_REACH_SELF = 1,
    MHC_REACH_PEER_ACCESS = 2,  // in one process, on one device or by peer access
    MHC_REACH_IPC = 3           // of another process, by CUDA IPC
} mhcReach;

// What is the same on all ranks, for reports.
typedef struct mhcGroupInfo {
    uint32_t struct_size;
    uint32_t timeout_ms;
    int32_t on_error;                             // mhcOnError
    int32_t wait_mode;                            // mhcWaitMode, as asked for
    int32_t device[MHC_MAX_RANKS];                // ordinal in the rank's process
    int32_t first_in_process[MHC_MAX_RANKS];      // the first rank of the rank's process
    int32_t first_on_device[MHC_MAX_RANKS];       // the first rank of the rank's device
    int32_t reach[MHC_MAX_RANKS][MHC_MAX_RANKS];  // mhcReach [from][to]
    char multicast_reason[MHC_REASON_BYTES];      // why NVLink multicast is not used
    char sentence[1024];                          // the whole decision
} mhcGroupInfo;
MHC_API mhcStatus mhcCommGetGroupInfo(mhcComm_t comm, mhcGroupInfo* info);

// Where libnccl.so.2 is, for a process in which nobody has loaded it and in which it is neither named by
// TRTLLM_MHC_NCCL nor on the loader's path. Takes effect until NCCL is first used.
MHC_API mhcStatus mhcNcclSetPath(char const* path);
// The version of the NCCL that is used, loading it; MHC_UNSUPPORTED says where it was looked for.
MHC_API mhcStatus mhcNcclVersion(int32_t* version);

// ---- which communicator a plugin uses -----------------------------------------------------------------------------

// Makes (comm, lane) current for the calling thread; comm = NULL clears it.
MHC_API mhcStatus mhcCommSetCurrent(mhcComm_t comm, int32_t lane);
// The current communicator of this thread if its group matches, else the only one registered for the group on the
// current device: MHC_NOT_BOUND when there is none or more than one. `groupSize` 0 = ranks 0 .. tpSize-1.
// `lane` receives the lane that was made current with it, or 0.
MHC_API mhcStatus mhcCommFind(int32_t tpSize, int32_t const* group, int32_t groupSize, mhcComm_t* comm, int32_t* lane);
// For the first enqueue of a plugin that has no communicator: the one that this process has made from the environment
// for (group, hidden size, device), made now where it is the first time. Device -1 is the current one. It has config's
// lanes, is not found by mhcCommFind and stays until the process ends. MHC_NOT_BOUND: there are no variables, or
// somebody has registered communicators for the group. MHC_CAPTURE_NOT_READY: it must be made, and `stream` is
// capturing.
MHC_API mhcStatus mhcCommFindEnvironment(mhcComm_t* comm, mhcCommConfig const* config, void* stream);
// Keeps comm alive while a context uses it (counted).
MHC_API mhcStatus mhcCommRetain(mhcComm_t comm);
MHC_API mhcStatus mhcCommRelease(mhcComm_t comm);

// ---- operations ----------------------------------------------------------------------------------------------------

typedef struct mhcBoundaryArgs {
    uint32_t struct_size;
    int32_t rows;          // M >= 0; 0 does nothing on every rank
    void const* x;         // [M,H] bf16, this rank's partial; with top_k > 0 NULL
    void const* residual;  // [M,hc,H] bf16
    float const* post;     // [M,hc]
    float const* comb;     // [M,hc,hc], [source, target]
    float const* pre;      // [M,hc]; NULL = residual-only
    void const* gamma;     // [H] bf16; NULL = residual-only
    float norm_eps;
    void* residual_out;  // [M,hc,H] bf16, must not overlap residual
    void* layer_input;   // [M,H] bf16; NULL = residual-only
    // MoE finalize in place of x
    int32_t top_k;                                // 0 = plain
    int32_t permuted_rows;                        // rows of gemm2_permuted
    void const* gemm2_permuted;                   // [permuted_rows,H] bf16
    float const* expert_weights;                  // [M,top_k]
    int32_t const* expanded_idx_to_permuted_idx;  // [M,top_k], -1: not on this rank
    void const* shared_output;                    // [M,H] bf16
    // MXFP8 layer input
    void* mxfp8_data;    // [M,H] e4m3 or NULL
    void* mxfp8_scales;  // mhcMxfp8ScaleBytes(M,H) bytes, 128x4 swizzled, or NULL
    // 1: x was stored into the mailbox by its producer; only the consumer is launched. Where M goes through NCCL
    // nothing is in the mailbox, and x must hold the values.
    int32_t published;
} mhcBoundaryArgs;

MHC_API size_t mhcMxfp8ScaleBytes(int32_t rows, int32_t hidden);
MHC_API mhcStatus mhcBoundary(mhcComm_t comm, int32_t lane, mhcBoundaryArgs const* args, void* stream);
// Stores x into the mailbox, as a producer does for a boundary with published = 1, which must be the lane's next call.
// At most `capacity` rows. Does nothing where M goes through NCCL.
MHC_API mhcStatus mhcPublish(mhcComm_t comm, int32_t lane, void const* x, int32_t rows, void* stream);

// For a producer that is not ours and stores its contribution into the mailbox itself, ahead of a boundary with
// published = 1. Addresses are those at which this rank reaches the memory, valid as long as the communicator; strides
// are in bytes.
//
// In kernels that run on this device and are ordered after the lane's call before, the producer, for every row t < M:
//   1. may take the row's ticket: compare-and-swap of `state[t].ticket` from 0 to `owner`. If another number was there,
//      it stores nothing for any row. Without this step a second user of the lane that comes and goes between the
//      producer's stores and mhcMarkPublished is not found;
//   2. reads n = `state[t].next`; g = n mod 3;
//   3. stores the row, H bf16 in which -0 (0x8000) has become +0, at every r < tp_size:
//        slots[r] + g * generation_stride + rank * rank_stride + t * row_stride
//      with stores that are visible system-wide once the kernel has ended. Each element once; no rows t >= M.
// Then mhcMarkPublished in the same stream does what is left: ticket, headers, and the note for the consumer. Nothing
// but `ticket` may be written in `state`.
typedef struct mhcPublishTarget {
    uint32_t struct_size;
    int32_t tp_size, rank, hidden_size;
    int32_t capacity;  // the largest M: the mailbox's capacity, or less where NCCL takes over
    uint32_t owner;    // under which this target's user takes tickets
    void* slots[MHC_MAX_RANKS];
    size_t generation_stride;
    size_t rank_stride;
    size_t row_stride;
    void* state;  // [capacity] of {uint32_t next, ticket, operation, rows}
} mhcPublishTarget;
// One target serves one producer at a time; every call hands out another `owner`.
MHC_API mhcStatus mhcCommPublishTarget(mhcComm_t comm, int32_t lane, mhcPublishTarget* target);
// Ends the publish of `rows` rows that a producer stored as above. The boundary must be the lane's next call.
MHC_API mhcStatus mhcMarkPublished(mhcComm_t comm, int32_t lane, uint32_t owner, int32_t rows, void* stream);

// The same arithmetic with this rank's contribution alone: tp_size 1, and a plugin whose phase gate is closed.
MHC_API mhcStatus mhcBoundaryLocal(int32_t hidden, mhcBoundaryArgs const* args, void* stream);
// sum = the fp32 sum in rank order, rounded once to bf16. x and sum may not overlap.
MHC_API mhcStatus mhcAllReduce(mhcComm_t comm, int32_t lane, void const* x, void* sum, int32_t rows, void* stream);
// The same through NCCL, whatever M: its order of summation, one or more roundings, and -0 where all ranks have -0.
// MHC_UNSUPPORTED where the communicator was made without NCCL.
MHC_API mhcStatus mhcAllReduceNccl(mhcComm_t comm, int32_t lane, void const* x, void* sum, int32_t rows, void* stream);
MHC_API mhcStatus mhcAllReduceLocal(void const* x, void* sum, int32_t rows, int32_t hidden, void* stream);

typedef enum mhcWeightType {
    MHC_WEIGHT_BF16 = 0,
    MHC_WEIGHT_E4M3_BLOCK32 = 1  // E4M3, one UE8M0 scale for each block of 32 rows and 32 columns
} mhcWeightType;

// out[m,n] = sum over k of activation[m,k] * weight[n,k], in fp32, rounded once to bf16, -0 as +0. A row's bits do not
// depend on M. E4M3 weights are multiplied by their scale and rounded to bf16 first, which is exact in bf16's range.
typedef struct mhcPublishLinearArgs {
    uint32_t struct_size;
    int32_t rows;               // M >= 0; 0 does nothing
    int32_t in_features;        // K of this rank: a multiple of 128, up to 16384
    int32_t weight_type;        // mhcWeightType
    void const* activation;     // [M,K] bf16
    void const* weight;         // [H,K] bf16 or E4M3; read before earlier work of the stream has ended
    void const* weight_scales;  // [H/32,K/32] UE8M0 bytes, likewise; NULL for bf16
    void* out;                  // [M,H] bf16
} mhcPublishLinearArgs;

// A row-parallel linear layer that stores its output into the mailbox as well, as mhcPublish would: at most `capacity`
// rows, and a boundary with published = 1 must be the lane's next call. With tp_size 1, and where M goes through NCCL,
// it only computes.
MHC_API mhcStatus mhcPublishLinear(mhcComm_t comm, int32_t lane, mhcPublishLinearArgs const* args, void* stream);
// `out` alone, for any M.
MHC_API mhcStatus mhcPublishLinearLocal(int32_t hidden, mhcPublishLinearArgs const* args, void* stream);

// The mHC coefficients of one sublayer, from its entry streams; all arithmetic in fp32, no communication:
//   mixes = (x @ fn^T) * rsqrt(mean(x^2) + rms_norm_eps)
//   pre = sigmoid(mixes[0:4] * scale[0] + base[0:4]) + hc_eps
//   post = sigmoid(mixes[4:8] * scale[1] + base[4:8]) * post_alpha
//   comb = Sinkhorn(softmax over targets(mixes[8:24] * scale[2] + base[8:24]) + hc_eps), [source, target]
typedef struct mhcCoefficientsArgs {
    uint32_t struct_size;
    int32_t rows;            // M >= 0
    int32_t hidden_size;     // H
    int32_t broadcast;       // 1: the first layer, where all streams are equal: streams is [M,H] and fn [24,H]
    int32_t sinkhorn_iters;  // >= 1, the first round (columns only) included
    float rms_norm_eps;
    float hc_eps;
    float post_alpha;
    void const* streams;  // [M,hc,H] bf16
    float const* fn;      // [24,hc*H], rows in the order pre, post, comb
    float const* scale;   // [3]
    float const* base;    // [24]
    float* post;          // [M,hc]
    float* comb;          // [M,hc,hc]
    float* pre;           // [M,hc]
    void* workspace;      // mhcCoefficientsWorkspaceBytes(M, H, broadcast) bytes, contents do not matter
    size_t workspace_bytes;
} mhcCoefficientsArgs;

MHC_API size_t mhcCoefficientsWorkspaceBytes(int32_t rows, int32_t hidden, int32_t broadcast);
MHC_API mhcStatus mhcCoefficients(mhcCoefficientsArgs const* args, void* stream);

#ifdef __cplusplus
}
#endif
#endif  // MHC_MHC_H
