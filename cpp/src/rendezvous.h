// SPDX-License-Identifier: Apache-2.0
//
// How ranks that are processes meet when nobody hands the library an all-gather: rank 0 listens at a place that all
// know, the others come to it. The connections stay, for later collective calls; a rank that ends is noticed at once.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "bootstrap.h"
#include "rendezvous_link.h"
#include "rendezvous_place.h"
#include "status.h"

namespace mhc {

// Rank 0's side of the meeting, until all are there.
class Lobby {
public:
    explicit Lobby(GroupIdentity group) : group_(std::move(group)), links_(static_cast<size_t>(group_.ranks)) {}

    // A connection, of whom nothing is known yet.
    void enter(Descriptor socket, Deadline deadline);
    // Reads what has come. Throws Failure when ranks do not fit together.
    void step();

    bool complete() const { return absent().empty(); }
    // The ranks that are missing, as text.
    std::string absent() const;
    std::string refusals() const;
    std::vector<int> descriptors() const;
    // By rank; that of rank 0 is empty.
    std::vector<std::unique_ptr<Link>>& links() { return links_; }

private:
    GroupIdentity group_;
    std::vector<Applicant> applicants_;
    std::vector<std::unique_ptr<Link>> links_;
    int refused_ = 0;
    std::string lastRefused_;
};

// What rank 0 tells the others when it gives up, as this rank's error. The sentence is a peer's: of bounded length, and
// without control characters.
Failure readFailure(std::vector<uint8_t> const& payload);

// Over TCP the secret must have at least kMinSecretBytes; in a folder it may be empty, since nobody else gets there.
constexpr size_t kMinSecretBytes = 16;

// Rank 0 returns when all ranks have come, the others when rank 0 has let them in. Throws Failure.
std::unique_ptr<Bootstrap> makeRendezvous(
    Place const& place, GroupIdentity const& group, int rank, std::chrono::milliseconds timeout);

}  // namespace mhc
