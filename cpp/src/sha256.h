// SPDX-License-Identifier: Apache-2.0
//
// SHA-256 (FIPS 180-4) and HMAC (RFC 2104), for the rendezvous. Written here because the library is loaded into
// processes of which only TensorRT and CUDA are known to be there.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace mhc {

using Digest = std::array<uint8_t, 32>;

class Sha256 {
public:
    Sha256& add(void const* data, size_t bytes);
    Digest finish();

private:
    void compress(uint8_t const* block);

    std::array<uint32_t, 8> state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                   0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    std::array<uint8_t, 64> block_{};
    uint64_t bytes_ = 0;
};

class Hmac {
public:
    Hmac(void const* key, size_t bytes);
    Hmac& add(void const* data, size_t bytes);
    template <typename T>
    Hmac& add(T const& value) {
        return add(&value, sizeof(value));
    }
    Digest finish();

private:
    Sha256 inner_;
    std::array<uint8_t, 64> outerKey_{};
};

// Takes the same time wherever the two differ.
bool sameDigest(Digest const& a, Digest const& b);

std::string hexadecimal(void const* data, size_t bytes);

}  // namespace mhc
