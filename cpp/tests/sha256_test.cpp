// SPDX-License-Identifier: Apache-2.0
//
// The examples of FIPS 180-4 and RFC 4231.
#include "../src/sha256.h"

#include <gtest/gtest.h>

#include <string>

namespace mhc {
namespace {

std::string hash(std::string const& text) {
    Digest const digest = Sha256().add(text.data(), text.size()).finish();
    return hexadecimal(digest.data(), digest.size());
}

std::string mac(std::string const& key, std::string const& text) {
    Digest const digest = Hmac(key.data(), key.size()).add(text.data(), text.size()).finish();
    return hexadecimal(digest.data(), digest.size());
}

TEST(Sha256, PublishedExamples) {
    EXPECT_EQ(hash(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    EXPECT_EQ(hash("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    EXPECT_EQ(
        hash("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
        "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
    EXPECT_EQ(hash(std::string(1000000, 'a')), "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(Sha256, PiecesOfAnySizeAreOneText) {
    std::string const text(300, 'x');
    for (size_t size = 1; size < 130; ++size) {
        Sha256 pieces;
        for (size_t at = 0; at < text.size(); at += size)
            pieces.add(text.data() + at, std::min(size, text.size() - at));
        Digest const digest = pieces.finish();
        ASSERT_EQ(hexadecimal(digest.data(), digest.size()), hash(text)) << size;
    }
}

TEST(Hmac, PublishedExamples) {
    EXPECT_EQ(
        mac(std::string(20, '\x0b'), "Hi There"), "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
    EXPECT_EQ(
        mac("Jefe", "what do ya want for nothing?"),
        "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
    EXPECT_EQ(
        mac(std::string(131, '\xaa'), "Test Using Larger Than Block-Size Key - Hash Key First"),
        "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
}

TEST(SameDigest, SeesEveryBit) {
    Digest const one{};
    EXPECT_TRUE(sameDigest(one, one));
    for (size_t byte = 0; byte < one.size(); ++byte) {
        for (int bit = 0; bit < 8; ++bit) {
            Digest other = one;
            other[byte] = static_cast<uint8_t>(other[byte] ^ (1 << bit));
            ASSERT_FALSE(sameDigest(one, other));
        }
    }
}

}  // namespace
}  // namespace mhc
