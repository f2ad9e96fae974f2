// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>

// Whether the fake devices reach each other's memory.
extern std::atomic<bool> fakePeerAccess;
// Kernels after an all-reduce of NCCL do not run: it waits for a peer.
extern std::atomic<bool> fakeNcclWaits;
// Boundary kernels launched on one rank's sum, and rows of the last one.
extern std::atomic<int> fakeLocalBoundaries;
extern std::atomic<int> fakeLastRows;
// Whether streams are capturing.
extern std::atomic<bool> fakeCapturing;
