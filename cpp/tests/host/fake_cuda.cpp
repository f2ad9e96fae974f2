// SPDX-License-Identifier: Apache-2.0
//
// A CUDA runtime without a GPU, and kernels that do nothing: enough for everything that the library's host side does
// when communicators are made, reset and closed. Device memory is host memory, so that sanitizers watch it. Two
// devices, which reach each other's memory.
#include <cuda_runtime_api.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "fake_cuda.h"
#include "kernels.h"

std::atomic<bool> fakePeerAccess{true};
std::atomic<bool> fakeNcclWaits{false};
std::atomic<int> fakeLocalBoundaries{0};
std::atomic<int> fakeLastRows{0};
std::atomic<bool> fakeCapturing{false};

namespace {

constexpr int kDevices = 2;
thread_local int currentDevice = 0;
std::mutex mutex;
std::map<void const*, int> deviceMemory;

cudaError_t allocate(void** memory, size_t bytes) {
    *memory = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
    return *memory == nullptr ? cudaErrorMemoryAllocation : cudaSuccess;
}

bool isDevice(int device) {
    return device >= 0 && device < kDevices;
}

}  // namespace

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
    *count = kDevices;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
    *device = currentDevice;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
    if (!isDevice(device))
        return cudaErrorInvalidDevice;
    currentDevice = device;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
    if (!isDevice(device))
        return cudaErrorInvalidDevice;
    std::memset(properties, 0, sizeof(*properties));
    properties->uuid.bytes[0] = static_cast<char>(1 + device);
    return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int from, int to) {
    if (!isDevice(from) || !isDevice(to))
        return cudaErrorInvalidDevice;
    *can = fakePeerAccess ? 1 : 0;
    return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int to, unsigned) {
    return isDevice(to) ? cudaSuccess : cudaErrorInvalidDevice;
}

cudaError_t cudaDeviceSynchronize() {
    return cudaSuccess;
}

cudaError_t cudaMalloc(void** memory, size_t bytes) {
    cudaError_t const status = allocate(memory, bytes);
    std::lock_guard<std::mutex> const lock(mutex);
    deviceMemory[*memory] = currentDevice;
    return status;
}

cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned) {
    return allocate(memory, bytes);
}

cudaError_t cudaFree(void* memory) {
    {
        std::lock_guard<std::mutex> const lock(mutex);
        deviceMemory.erase(memory);
    }
    std::free(memory);
    return cudaSuccess;
}

cudaError_t cudaFreeHost(void* memory) {
    std::free(memory);
    return cudaSuccess;
}

cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) {
    *device = host;
    return cudaSuccess;
}

cudaError_t cudaMemset(void* memory, int value, size_t bytes) {
    std::memset(memory, value, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemcpy(void* to, void const* from, size_t bytes, cudaMemcpyKind) {
    std::memcpy(to, from, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, void const* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
    std::memcpy(to, from, bytes);
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
    *stream = reinterpret_cast<cudaStream_t>(1);
    return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t) {
    return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t) {
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, void const* pointer) {
    std::lock_guard<std::mutex> const lock(mutex);
    *attributes = {};
    auto const found = deviceMemory.find(pointer);
    if (found != deviceMemory.end()) {
        attributes->type = cudaMemoryTypeDevice;
        attributes->device = found->second;
    }
    return cudaSuccess;
}

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void*) {
    std::memset(handle, 0x55, sizeof(*handle));
    return cudaSuccess;
}

// Nobody looks into what is mapped.
cudaError_t cudaIpcOpenMemHandle(void** memory, cudaIpcMemHandle_t handle, unsigned) {
    if (handle.reserved[0] != 0x55)
        return cudaErrorInvalidValue;
    return allocate(memory, 1);
}

cudaError_t cudaIpcCloseMemHandle(void* memory) {
    std::free(memory);
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
    *status = fakeCapturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

cudaError_t cudaGetLastError() {
    return cudaSuccess;
}

char const* cudaGetErrorName(cudaError_t error) {
    return error == cudaSuccess ? "cudaSuccess" : "cudaError";
}

char const* cudaGetErrorString(cudaError_t error) {
    return cudaGetErrorName(error);
}

}  // extern "C"

namespace mhc {

bool hiddenSizeSupported(int hidden) {
    return hidden == 4096 || hidden == 5120 || hidden == 7168;
}

cudaError_t residentExchangeRows(int, int, int& rows) {
    rows = 32;
    return cudaSuccess;
}

cudaError_t loadAllKernels() {
    return cudaSuccess;
}

cudaError_t launchFill(void* memory, size_t bytes, cudaStream_t) {
    std::memset(memory, 0x80, bytes);
    return cudaSuccess;
}

cudaError_t launchPublish(Mailbox const&, uint4 const*, Chunk const&, Launch, cudaStream_t) {
    return cudaSuccess;
}

cudaError_t launchFinalizePublish(Mailbox const&, FinalizeInput const&, Chunk const&, Launch, cudaStream_t) {
    return cudaSuccess;
}

cudaError_t launchMarkPublished(Mailbox const&, Chunk const&, cudaStream_t) {
    return cudaSuccess;
}

cudaError_t launchGate(Mailbox const&, Chunk const&, cudaStream_t) {
    return cudaSuccess;
}

cudaError_t launchBoundary(BoundaryShape const& shape, Mailbox const&, BoundaryArgs const& args, Launch, cudaStream_t) {
    if (shape.source == Source::kLocal)
        ++fakeLocalBoundaries;
    fakeLastRows = args.chunk.rows;
    return cudaSuccess;
}

cudaError_t launchNcclBegin(
    Mailbox const&, NcclProgress* progress, NcclBeat* beat, FinalizeInput const&, Chunk const&, cudaStream_t) {
    __atomic_store_n(&beat->started, ++progress->started, __ATOMIC_RELEASE);
    return cudaSuccess;
}

cudaError_t launchNcclEnd(
    Mailbox const& box, NcclProgress* progress, NcclBeat* beat, uint32_t epoch, uint4* sum, size_t fragments, uint32_t,
    cudaStream_t) {
    if (fakeNcclWaits)
        return cudaSuccess;
    if (__atomic_load_n(&box.record->kind, __ATOMIC_ACQUIRE) != MHC_ERROR_NONE || progress->epoch != epoch)
        std::memset(static_cast<void*>(sum), 0xFF, fragments * sizeof(uint4));
    __atomic_store_n(&beat->finished, ++progress->finished, __ATOMIC_RELEASE);
    return cudaSuccess;
}

cudaError_t launchLinear(LinearInput const&, int, cudaStream_t) {
    return cudaSuccess;
}

cudaError_t launchPublishLinear(Mailbox const&, LinearInput const&, Chunk const&, cudaStream_t) {
    return cudaSuccess;
}

cudaError_t launchCoefficients(CoefficientsInput const&, cudaStream_t) {
    return cudaSuccess;
}

}  // namespace mhc
