// SPDX-License-Identifier: Apache-2.0
//
// What a fuzzer was given, to be taken piece by piece. Once it is used up, bytes are 0 and texts empty.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

class Input {
public:
    Input(uint8_t const* data, size_t size) : data_(data), size_(size) {}

    uint8_t byte() {
        if (size_ == 0)
            return 0;
        --size_;
        return *data_++;
    }
    // As many bytes as there are, `count` at most.
    std::string text(size_t count) {
        count = std::min(count, size_);
        std::string const taken(reinterpret_cast<char const*>(data_), count);
        data_ += count;
        size_ -= count;
        return taken;
    }
    std::string rest() { return text(size_); }
    // `count` bytes in a block of exactly that size, so that reads beyond it are found.
    std::vector<uint8_t> bytes(size_t count) {
        std::string const given = text(count);
        std::vector<uint8_t> taken(count);
        std::copy(given.begin(), given.end(), taken.begin());
        return taken;
    }
    bool empty() const { return size_ == 0; }

private:
    uint8_t const* data_;
    size_t size_;
};
