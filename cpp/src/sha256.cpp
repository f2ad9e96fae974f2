// SPDX-License-Identifier: Apache-2.0
#include "sha256.h"

#include <algorithm>
#include <cstring>

namespace mhc {
namespace {

constexpr std::array<uint32_t, 64> kRoundConstants{
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

uint32_t rotate(uint32_t x, int bits) {
    return (x >> bits) | (x << (32 - bits));
}

uint32_t bigEndian(uint8_t const* bytes) {
    return uint32_t{bytes[0]} << 24 | uint32_t{bytes[1]} << 16 | uint32_t{bytes[2]} << 8 | bytes[3];
}

}  // namespace

Sha256& Sha256::add(void const* data, size_t bytes) {
    auto const* from = static_cast<uint8_t const*>(data);
    while (bytes > 0) {
        size_t const at = bytes_ % block_.size();
        size_t const count = std::min(bytes, block_.size() - at);
        std::memcpy(block_.data() + at, from, count);
        bytes_ += count;
        from += count;
        bytes -= count;
        if (at + count == block_.size())
            compress(block_.data());
    }
    return *this;
}

Digest Sha256::finish() {
    uint64_t const bits = bytes_ * 8;
    uint8_t const one = 0x80;
    add(&one, 1);
    uint8_t const zero = 0;
    while (bytes_ % block_.size() != block_.size() - sizeof(bits))
        add(&zero, 1);
    uint8_t length[sizeof(bits)];
    for (size_t i = 0; i < sizeof(bits); ++i)
        length[i] = static_cast<uint8_t>(bits >> (8 * (sizeof(bits) - 1 - i)));
    add(length, sizeof(length));
    Digest digest;
    for (size_t i = 0; i < digest.size(); ++i)
        digest[i] = static_cast<uint8_t>(state_[i / 4] >> (24 - 8 * (i % 4)));
    return digest;
}

void Sha256::compress(uint8_t const* block) {
    std::array<uint32_t, 64> w;
    for (size_t i = 0; i < 16; ++i)
        w[i] = bigEndian(block + 4 * i);
    for (size_t i = 16; i < w.size(); ++i) {
        uint32_t const s0 = rotate(w[i - 15], 7) ^ rotate(w[i - 15], 18) ^ (w[i - 15] >> 3);
        uint32_t const s1 = rotate(w[i - 2], 17) ^ rotate(w[i - 2], 19) ^ (w[i - 2] >> 10);
        w[i] = w[i - 16] + s0 + w[i - 7] + s1;
    }
    auto [a, b, c, d, e, f, g, h] = state_;
    for (size_t i = 0; i < w.size(); ++i) {
        uint32_t const sum1 = rotate(e, 6) ^ rotate(e, 11) ^ rotate(e, 25);
        uint32_t const choice = (e & f) ^ (~e & g);
        uint32_t const t1 = h + sum1 + choice + kRoundConstants[i] + w[i];
        uint32_t const sum0 = rotate(a, 2) ^ rotate(a, 13) ^ rotate(a, 22);
        uint32_t const majority = (a & b) ^ (a & c) ^ (b & c);
        h = g;
        g = f;
        f = e;
        e = d + t1;
        d = c;
        c = b;
        b = a;
        a = t1 + sum0 + majority;
    }
    std::array<uint32_t, 8> const mixed{a, b, c, d, e, f, g, h};
    for (size_t i = 0; i < mixed.size(); ++i)
        state_[i] += mixed[i];
}

Hmac::Hmac(void const* key, size_t bytes) {
    std::array<uint8_t, 64> padded{};
    if (bytes > padded.size()) {
        Digest const digest = Sha256().add(key, bytes).finish();
        std::copy(digest.begin(), digest.end(), padded.begin());
    } else if (bytes > 0) {
        std::memcpy(padded.data(), key, bytes);
    }
    for (size_t i = 0; i < padded.size(); ++i) {
        outerKey_[i] = padded[i] ^ 0x5c;
        padded[i] ^= 0x36;
    }
    inner_.add(padded.data(), padded.size());
}

Hmac& Hmac::add(void const* data, size_t bytes) {
    inner_.add(data, bytes);
    return *this;
}

Digest Hmac::finish() {
    Digest const inner = inner_.finish();
    return Sha256().add(outerKey_.data(), outerKey_.size()).add(inner.data(), inner.size()).finish();
}

bool sameDigest(Digest const& a, Digest const& b) {
    // Volatile, so that the compiler does not stop at the first difference.
    uint8_t volatile difference = 0;
    for (size_t i = 0; i < a.size(); ++i)
        difference = static_cast<uint8_t>(difference | (a[i] ^ b[i]));
    return difference == 0;
}

std::string hexadecimal(void const* data, size_t bytes) {
    static char const digits[] = "0123456789abcdef";
    std::string text;
    for (size_t i = 0; i < bytes; ++i) {
        uint8_t const byte = static_cast<uint8_t const*>(data)[i];
        text += digits[byte >> 4];
        text += digits[byte & 15];
    }
    return text;
}

}  // namespace mhc
