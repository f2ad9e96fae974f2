// SPDX-License-Identifier: Apache-2.0
//
// Where the ranks of a group meet, and what keeps others out: a folder that belongs to the user alone and holds a
// socket, or a TCP address.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

namespace mhc {

// An open file, closed at the end of its life.
class Descriptor {
public:
    explicit Descriptor(int number = -1) noexcept : number_(number) {}
    Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
    Descriptor& operator=(Descriptor&& other) noexcept {
        std::swap(number_, other.number_);
        return *this;
    }
    ~Descriptor();

    int get() const noexcept { return number_; }
    explicit operator bool() const noexcept { return number_ >= 0; }

private:
    int number_;
};

// One group's meeting place.
class Place {
public:
    // `text`: the absolute path of a folder, or tcp://HOST:PORT with HOST a numeric address or "localhost". `name`
    // tells the groups that meet in one folder apart. Over TCP a group meets at PORT + portOffset. Throws.
    Place(std::string const& text, std::string name, int portOffset = 0);

    bool isTcp() const { return folder_.empty(); }
    // For messages.
    std::string const& text() const { return text_; }

    // Rank 0: waits for connections here. Throws when another process does so already.
    Descriptor listen() const;
    // The other ranks: nothing while nobody listens.
    std::optional<Descriptor> connect() const;
    // The next connection of a listening socket; nothing when there is none or it is not the same user's.
    std::optional<Descriptor> accept(Descriptor const& listening) const;
    // Takes the socket out of the folder again.
    void leave() const noexcept;

private:
    std::string folder_;
    std::string name_;
    std::string host_;
    uint16_t port_ = 0;
    std::string text_;
};

// Who is at the other end of a connection: an address, or a process.
std::string peerName(Descriptor const& connection);

// The first line of a file that only its user may read. Throws without a word of what it holds.
std::string readSecretFile(std::string const& path);

}  // namespace mhc
