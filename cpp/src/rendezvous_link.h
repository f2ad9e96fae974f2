// SPDX-License-Identifier: Apache-2.0
//
// A connection between rank 0 and another rank over which both have proven that they know the group's secret.
//
//   rank 0 -> rank r   challenge {magic, nonce of rank 0}
//   rank r -> rank 0   proof {magic, nonce of rank r, r, number of ranks, mac}
//   rank 0 -> rank r   welcome {mac}
//   then, both ways    {kind, bytes, mac} and the payload
//
// Every mac is HMAC-SHA256: of the handshake under the secret, over both nonces and the group's name; of messages under
// a key derived from that, over direction, running number, head and payload. Nothing but sizes is looked at before a
// mac has been found right, and no size is believed beyond what the reader expects.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "rendezvous_place.h"
#include "sha256.h"

namespace mhc {

using Deadline = std::chrono::steady_clock::time_point;

// What the ranks of one group know.
struct GroupIdentity {
    std::string secret;
    std::string name;
    int32_t ranks = 0;
};

// A stream of bytes that never blocks for longer than told.
class Connection {
public:
    explicit Connection(Descriptor socket) : socket_(std::move(socket)), peer_(peerName(socket_)) {}

    enum class Arrival { kPartly, kComplete, kClosed };
    // Reads what is there, until `bytes` bytes lie in data().
    Arrival read(size_t bytes);
    std::vector<uint8_t> const& data() const { return data_; }
    void consume() { data_.clear(); }
    // False when the other end has closed, or does not read.
    bool write(void const* data, size_t bytes, Deadline deadline);

    int descriptor() const { return socket_.get(); }
    std::string const& peer() const { return peer_; }

private:
    Descriptor socket_;
    std::string peer_;
    std::vector<uint8_t> data_;
};

enum class MessageKind : uint32_t { kContribution = 1, kGathered = 2, kFailure = 3 };

class Link {
public:
    Link(Connection connection, Digest const& key, bool rankZero)
        : connection_(std::move(connection)), key_(key), rankZero_(rankZero) {}

    bool send(MessageKind kind, void const* payload, size_t bytes, Deadline deadline);

    struct Message {
        MessageKind kind;
        std::vector<uint8_t> payload;
    };
    // Reads what is there. True once `message` is whole. Throws Failure(MHC_PEER_FAILED) when the connection is closed,
    // a mac is wrong, or a payload is larger than `limit`.
    bool receive(Message& message, size_t limit);

    int descriptor() const { return connection_.descriptor(); }
    std::string const& peer() const { return connection_.peer(); }

private:
    struct Head {
        uint32_t kind;
        uint32_t bytes;
        Digest mac;
    };
    Digest macOf(bool fromRankZero, uint64_t number, Head const& head, void const* payload) const;

    Connection connection_;
    Digest key_;
    bool rankZero_;
    uint64_t sent_ = 0;
    uint64_t received_ = 0;
    Head head_{};
    bool haveHead_ = false;
};

// Rank 0's side of a connection that has yet to prove itself.
class Applicant {
public:
    // Sends the challenge.
    Applicant(Descriptor socket, Deadline deadline);

    enum class State { kWaiting, kProven, kRefused };
    State step(GroupIdentity const& group);
    // Once proven. Nothing is known about the values but that a holder of the secret sent them.
    int32_t rank() const { return rank_; }
    int32_t ranks() const { return ranks_; }
    // Sends the welcome; the connection moves on.
    Link admit(GroupIdentity const& group);

    Deadline deadline() const { return deadline_; }
    int descriptor() const { return connection_.descriptor(); }
    std::string const& peer() const { return connection_.peer(); }

private:
    Connection connection_;
    Deadline deadline_;
    Digest nonce_{};
    std::vector<uint8_t> transcript_;
    int32_t rank_ = -1;
    int32_t ranks_ = 0;
};

// The other ranks' side of the handshake. Throws Failure.
Link applyTo(Descriptor socket, GroupIdentity const& group, int32_t rank, std::string const& where, Deadline deadline);

// Waits for a descriptor to become readable. False at the deadline.
bool awaitReadable(int descriptor, Deadline deadline);
int millisecondsUntil(Deadline deadline);

}  // namespace mhc
