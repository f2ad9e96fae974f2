// SPDX-License-Identifier: Apache-2.0
#include "rendezvous_link.h"

#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "status.h"

namespace mhc {
namespace {

using Clock = std::chrono::steady_clock;
using Nonce = std::array<uint8_t, 16>;

constexpr uint64_t kMagic = 0x31302d434852686dULL;

struct Challenge {
    uint64_t magic;
    Nonce nonce;
};

struct Proof {
    uint64_t magic;
    Nonce nonce;
    int32_t rank;
    int32_t ranks;
    Digest mac;
};

struct Welcome {
    Digest mac;
};

static_assert(sizeof(Challenge) == 24 && sizeof(Proof) == 64 && sizeof(Welcome) == 32, "no padding may be sent");

Nonce makeNonce() {
    Nonce nonce;
    size_t have = 0;
    while (have < nonce.size()) {
        ssize_t const count = getrandom(nonce.data() + have, nonce.size() - have, 0);
        if (count < 0 && errno != EINTR)
            fail(MHC_INVALID_ARGUMENT, "getrandom: ", std::strerror(errno));
        have += count > 0 ? static_cast<size_t>(count) : 0;
    }
    return nonce;
}

// Everything that the two ends have said, before the macs.
std::vector<uint8_t> transcriptOf(Nonce const& ofRankZero, Proof const& proof) {
    std::vector<uint8_t> text(ofRankZero.begin(), ofRankZero.end());
    text.insert(text.end(), proof.nonce.begin(), proof.nonce.end());
    auto const* const ranks = reinterpret_cast<uint8_t const*>(&proof.rank);
    text.insert(text.end(), ranks, ranks + sizeof(proof.rank) + sizeof(proof.ranks));
    return text;
}

Digest handshakeMac(GroupIdentity const& group, char const* role, std::vector<uint8_t> const& transcript) {
    Digest const name = Sha256().add(group.name.data(), group.name.size()).finish();
    return Hmac(group.secret.data(), group.secret.size())
        .add(role, std::strlen(role) + 1)
        .add(name)
        .add(transcript.data(), transcript.size())
        .finish();
}

template <typename T>
T valueOf(std::vector<uint8_t> const& bytes) {
    T value;
    std::memcpy(&value, bytes.data(), sizeof(value));
    return value;
}

}  // namespace

int millisecondsUntil(Deadline deadline) {
    auto const left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
    return static_cast<int>(std::clamp<int64_t>(left + 1, 0, 1 << 30));
}

bool awaitReadable(int descriptor, Deadline deadline) {
    while (Clock::now() < deadline) {
        pollfd waiting{descriptor, POLLIN, 0};
        if (poll(&waiting, 1, millisecondsUntil(deadline)) > 0)
            return true;
    }
    return false;
}

Connection::Arrival Connection::read(size_t bytes) {
    while (data_.size() < bytes) {
        // In pieces, so that memory is given for what has come and not for what was announced.
        std::array<uint8_t, 4096> piece;
        ssize_t const count =
            recv(socket_.get(), piece.data(), std::min(piece.size(), bytes - data_.size()), MSG_DONTWAIT);
        if (count > 0) {
            data_.insert(data_.end(), piece.begin(), piece.begin() + count);
        } else if (count == 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)) {
            return Arrival::kClosed;
        } else if (errno != EINTR) {
            return Arrival::kPartly;
        }
    }
    return Arrival::kComplete;
}

bool Connection::write(void const* data, size_t bytes, Deadline deadline) {
    auto const* from = static_cast<uint8_t const*>(data);
    while (bytes > 0) {
        ssize_t const count = ::send(socket_.get(), from, bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (count > 0) {
            from += count;
            bytes -= static_cast<size_t>(count);
        } else if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) {
            return false;
        } else {
            pollfd waiting{socket_.get(), POLLOUT, 0};
            if (poll(&waiting, 1, millisecondsUntil(deadline)) <= 0 && Clock::now() >= deadline)
                return false;
        }
    }
    return true;
}

Digest Link::macOf(bool fromRankZero, uint64_t number, Head const& head, void const* payload) const {
    uint32_t const direction = fromRankZero ? 1 : 2;
    return Hmac(key_.data(), key_.size())
        .add(direction)
        .add(number)
        .add(head.kind)
        .add(head.bytes)
        .add(payload, head.bytes)
        .finish();
}

bool Link::send(MessageKind kind, void const* payload, size_t bytes, Deadline deadline) {
    Head head{static_cast<uint32_t>(kind), static_cast<uint32_t>(bytes), {}};
    head.mac = macOf(rankZero_, sent_++, head, payload);
    std::vector<uint8_t> message(sizeof(head) + bytes);
    std::memcpy(message.data(), &head, sizeof(head));
    if (bytes > 0)
        std::memcpy(message.data() + sizeof(head), payload, bytes);
    return connection_.write(message.data(), message.size(), deadline);
}

bool Link::receive(Message& message, size_t limit) {
    auto const arrived = [&](size_t bytes) {
        Connection::Arrival const arrival = connection_.read(bytes);
        if (arrival == Connection::Arrival::kClosed)
            fail(MHC_PEER_FAILED, "the connection to ", peer(), " was closed: its process ended or gave up");
        return arrival == Connection::Arrival::kComplete;
    };
    if (!haveHead_) {
        if (!arrived(sizeof(Head)))
            return false;
        head_ = valueOf<Head>(connection_.data());
        if (head_.bytes > limit) {
            fail(
                MHC_PEER_FAILED, peer(), " announces a message of ", head_.bytes, " bytes, expected at most ", limit,
                ": the ranks are not in the same call");
        }
        connection_.consume();
        haveHead_ = true;
    }
    if (!arrived(head_.bytes))
        return false;
    haveHead_ = false;
    message.kind = static_cast<MessageKind>(head_.kind);
    message.payload = connection_.data();
    connection_.consume();
    if (!sameDigest(head_.mac, macOf(!rankZero_, received_++, head_, message.payload.data())))
        fail(MHC_PEER_FAILED, "a message from ", peer(), " is not what the rank has sent");
    return true;
}

Applicant::Applicant(Descriptor socket, Deadline deadline) : connection_(std::move(socket)), deadline_(deadline) {
    Challenge const challenge{kMagic, makeNonce()};
    std::copy(challenge.nonce.begin(), challenge.nonce.end(), nonce_.begin());
    // Fits into any socket's buffer: who does not take it is gone.
    connection_.write(&challenge, sizeof(challenge), Clock::now());
}

Applicant::State Applicant::step(GroupIdentity const& group) {
    switch (connection_.read(sizeof(Proof))) {
        case Connection::Arrival::kPartly:
            return State::kWaiting;
        case Connection::Arrival::kClosed:
            return State::kRefused;
        case Connection::Arrival::kComplete:
            break;
    }
    auto const proof = valueOf<Proof>(connection_.data());
    connection_.consume();
    Nonce mine;
    std::copy_n(nonce_.begin(), mine.size(), mine.begin());
    transcript_ = transcriptOf(mine, proof);
    if (!sameDigest(proof.mac, handshakeMac(group, "rank", transcript_)))
        return State::kRefused;
    rank_ = proof.rank;
    ranks_ = proof.ranks;
    return State::kProven;
}

Link Applicant::admit(GroupIdentity const& group) {
    Welcome const welcome{handshakeMac(group, "rank 0", transcript_)};
    connection_.write(&welcome, sizeof(welcome), deadline_);
    return Link(std::move(connection_), handshakeMac(group, "messages", transcript_), true);
}

Link applyTo(Descriptor socket, GroupIdentity const& group, int32_t rank, std::string const& where, Deadline deadline) {
    Connection connection(std::move(socket));
    auto const await = [&](size_t bytes, char const* closed) {
        for (;;) {
            Connection::Arrival const arrival = connection.read(bytes);
            if (arrival == Connection::Arrival::kComplete)
                return;
            if (arrival == Connection::Arrival::kClosed)
                fail(MHC_PEER_FAILED, "rank 0 at ", where, closed);
            if (!awaitReadable(connection.descriptor(), deadline))
                fail(MHC_TIMEOUT, "rank 0 at ", where, " did not answer in time");
        }
    };
    await(sizeof(Challenge), " closed the connection before it said anything");
    auto const challenge = valueOf<Challenge>(connection.data());
    connection.consume();
    if (challenge.magic != kMagic)
        fail(MHC_PEER_FAILED, "what listens at ", where, " is no rank 0 of this library's version");
    Proof proof{kMagic, makeNonce(), rank, group.ranks, {}};
    std::vector<uint8_t> const transcript = transcriptOf(challenge.nonce, proof);
    proof.mac = handshakeMac(group, "rank", transcript);
    char const* const refused =
        " refused this rank: it has another secret (TRTLLM_MHC_SECRET, TRTLLM_MHC_SECRET_FILE), is of another job or "
        "group, "
        "or ended";
    if (!connection.write(&proof, sizeof(proof), deadline))
        fail(MHC_PEER_FAILED, "rank 0 at ", where, refused);
    await(sizeof(Welcome), refused);
    auto const welcome = valueOf<Welcome>(connection.data());
    connection.consume();
    if (!sameDigest(welcome.mac, handshakeMac(group, "rank 0", transcript)))
        fail(MHC_PEER_FAILED, "what listens at ", where, " does not know the group's secret");
    return Link(std::move(connection), handshakeMac(group, "messages", transcript), false);
}

}  // namespace mhc
