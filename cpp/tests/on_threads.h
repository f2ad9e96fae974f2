// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <exception>
#include <functional>
#include <string>
#include <thread>
#include <vector>

namespace mhc {

// Runs `work(rank)` on a thread each; returns what each threw, or "".
inline std::vector<std::string> onThreads(int ranks, std::function<void(int)> const& work) {
    std::vector<std::string> errors(static_cast<size_t>(ranks));
    std::vector<std::thread> threads;
    for (int r = 0; r < ranks; ++r) {
        threads.emplace_back([&, r] {
            try {
                work(r);
            } catch (std::exception const& error) {
                errors[static_cast<size_t>(r)] = error.what();
            }
        });
    }
    for (std::thread& thread : threads)
        thread.join();
    return errors;
}

}  // namespace mhc
