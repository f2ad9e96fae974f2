// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>

// Whether the fake devices reach each other's memory.
extern std::atomic<bool> fakePeerAccess;
