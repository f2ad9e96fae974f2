// SPDX-License-Identifier: Apache-2.0
#include "rendezvous.h"

#include <poll.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <thread>
#include <vector>

#include "status.h"

namespace mhc {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// Connections that prove nothing must not keep the others out.
constexpr size_t kMaxApplicants = 64;
constexpr milliseconds kProofTime{5000};
constexpr milliseconds kFarewellTime{200};
constexpr size_t kMaxReason = 512;

// A failure as it is told to the other ranks.
struct FailureText {
    uint32_t status;
    char sentence[kMaxReason];
};

// Waits until one of the descriptors has something to read, or until the deadline.
void awaitAny(std::vector<int> const& descriptors, Deadline deadline) {
    std::vector<pollfd> waiting;
    for (int const descriptor : descriptors)
        waiting.push_back({descriptor, POLLIN, 0});
    poll(waiting.data(), waiting.size(), millisecondsUntil(deadline));
}

// Once a call has failed the ranks are at different places, so that none of the later ones can go well.
class RendezvousBootstrap : public Bootstrap {
public:
    void allGather(void const* send, void* receive, size_t bytes) final {
        if (!ended_.empty())
            fail(MHC_PEER_FAILED, "the ranks do not meet any more: ", ended_);
        try {
            gatherOnce(send, receive, bytes);
        } catch (std::exception const& error) {
            ended_ = error.what();
            throw;
        }
    }

protected:
    virtual void gatherOnce(void const* send, void* receive, size_t bytes) = 0;

private:
    std::string ended_;
};

class RankZero : public RendezvousBootstrap {
public:
    RankZero(Place const& place, GroupIdentity const& group, milliseconds timeout)
        : ranks_(group.ranks), timeout_(timeout), links_(static_cast<size_t>(group.ranks)) {
        if (ranks_ == 1)
            return;
        Deadline const deadline = Clock::now() + timeout;
        Descriptor const listening = place.listen();
        Lobby lobby(group);
        try {
            receiveAll(place, listening, lobby, deadline);
        } catch (Failure const& failure) {
            place.leave();
            links_ = std::move(lobby.links());
            tellAll(failure);
            throw;
        }
        place.leave();
        links_ = std::move(lobby.links());
    }

    void gatherOnce(void const* send, void* receive, size_t bytes) override {
        try {
            gatherFromAll(send, static_cast<uint8_t*>(receive), bytes);
        } catch (Failure const& failure) {
            tellAll(failure);
            throw;
        }
    }

private:
    void receiveAll(Place const& place, Descriptor const& listening, Lobby& lobby, Deadline deadline) const {
        while (!lobby.complete()) {
            if (Clock::now() >= deadline) {
                fail(
                    MHC_TIMEOUT, "rank(s) ", lobby.absent(), " of ", ranks_, " did not come to ", place.text(),
                    " within ", timeout_.count(), " ms", lobby.refusals());
            }
            std::vector<int> descriptors = lobby.descriptors();
            descriptors.push_back(listening.get());
            awaitAny(descriptors, std::min(deadline, Clock::now() + milliseconds(100)));
            while (std::optional<Descriptor> socket = place.accept(listening))
                lobby.enter(std::move(*socket), std::min(deadline, Clock::now() + kProofTime));
            lobby.step();
        }
    }

    void gatherFromAll(void const* send, uint8_t* receive, size_t bytes) {
        Deadline const deadline = Clock::now() + timeout_;
        std::memcpy(receive, send, bytes);
        std::vector<bool> here(links_.size(), false);
        here[0] = true;
        for (;;) {
            std::vector<int> waitingFor;
            std::string absent;
            for (size_t r = 1; r < links_.size(); ++r) {
                if (here[r] || (here[r] = contributionOf(r, receive + r * bytes, bytes)))
                    continue;
                waitingFor.push_back(links_[r]->descriptor());
                absent += (absent.empty() ? "" : ", ") + std::to_string(r);
            }
            if (waitingFor.empty())
                break;
            if (Clock::now() >= deadline) {
                fail(MHC_TIMEOUT, "rank(s) ", absent, " of ", ranks_, " did not come within ", timeout_.count(), " ms");
            }
            awaitAny(waitingFor, deadline);
        }
        for (size_t r = 1; r < links_.size(); ++r) {
            if (!links_[r]->send(MessageKind::kGathered, receive, bytes * links_.size(), deadline))
                fail(MHC_PEER_FAILED, "rank ", r, " (", links_[r]->peer(), ") ended, or takes no answer");
        }
    }

    bool contributionOf(size_t r, uint8_t* to, size_t bytes) {
        Link::Message message{};
        try {
            if (!links_[r]->receive(message, bytes))
                return false;
        } catch (Failure const& failure) {
            fail(failure.status(), "rank ", r, ": ", failure.what());
        }
        if (message.kind != MessageKind::kContribution || message.payload.size() != bytes) {
            fail(
                MHC_PEER_FAILED, "rank ", r, " exchanges ", message.payload.size(), " bytes where rank 0 exchanges ",
                bytes, ": the ranks are not in the same call");
        }
        std::memcpy(to, message.payload.data(), bytes);
        return true;
    }

    // So that each rank says what was wrong, and none waits for what will not come.
    void tellAll(Failure const& failure) noexcept {
        try {
            FailureText text{static_cast<uint32_t>(failure.status()), {}};
            std::strncpy(text.sentence, failure.what(), sizeof(text.sentence) - 1);
            for (std::unique_ptr<Link>& link : links_) {
                if (link)
                    link->send(MessageKind::kFailure, &text, sizeof(text), Clock::now() + kFarewellTime);
            }
        } catch (std::exception const&) {
            // They see the connection end.
        }
        links_.clear();
    }

    int ranks_;
    milliseconds timeout_;
    std::vector<std::unique_ptr<Link>> links_;
};

class OtherRank : public RendezvousBootstrap {
public:
    OtherRank(Place const& place, GroupIdentity const& group, int rank, milliseconds timeout)
        : timeout_(timeout), ranks_(static_cast<size_t>(group.ranks)), link_(reach(place, group, rank, timeout)) {}

    void gatherOnce(void const* send, void* receive, size_t bytes) override {
        // Rank 0 waits as long for the others, and may have come later: its word on who is missing is worth waiting
        // for.
        Deadline const deadline = Clock::now() + timeout_ + std::max(timeout_ / 4, milliseconds(250));
        // What cannot be sent is explained by what rank 0 has sent.
        link_.send(MessageKind::kContribution, send, bytes, deadline);
        Link::Message message{};
        while (!receiveFrom(message, std::max(bytes * ranks_, sizeof(FailureText)))) {
            if (!awaitReadable(link_.descriptor(), deadline)) {
                fail(
                    MHC_TIMEOUT, "rank 0 did not answer within ", timeout_.count(),
                    " ms: it does not come, or waits for a rank that does not");
            }
        }
        if (message.kind == MessageKind::kFailure)
            throw readFailure(message.payload);
        if (message.kind != MessageKind::kGathered || message.payload.size() != bytes * ranks_) {
            fail(
                MHC_PEER_FAILED, "rank 0 answers with ", message.payload.size(), " bytes, expected ", bytes * ranks_,
                ": the ranks are not in the same call");
        }
        std::memcpy(receive, message.payload.data(), message.payload.size());
    }

private:
    static Link reach(Place const& place, GroupIdentity const& group, int rank, milliseconds timeout) {
        Deadline const deadline = Clock::now() + timeout;
        milliseconds pause{1};
        while (Clock::now() < deadline) {
            if (std::optional<Descriptor> socket = place.connect())
                return applyTo(std::move(*socket), group, rank, place.text(), deadline);
            std::this_thread::sleep_for(pause);
            pause = std::min(2 * pause, milliseconds(50));
        }
        fail(
            MHC_TIMEOUT, "rank 0 of ", group.ranks, " did not come to ", place.text(), " within ", timeout.count(),
            " ms");
    }

    bool receiveFrom(Link::Message& message, size_t limit) {
        try {
            return link_.receive(message, limit);
        } catch (Failure const& failure) {
            fail(failure.status(), "rank 0: ", failure.what());
        }
    }

    milliseconds timeout_;
    size_t ranks_;
    Link link_;
};

}  // namespace

Failure readFailure(std::vector<uint8_t> const& payload) {
    FailureText told{};
    std::copy_n(payload.begin(), std::min(payload.size(), sizeof(told)), reinterpret_cast<uint8_t*>(&told));
    std::string sentence(told.sentence, strnlen(told.sentence, sizeof(told.sentence)));
    std::replace_if(sentence.begin(), sentence.end(), [](unsigned char c) { return c < 0x20 || c == 0x7F; }, '?');
    return Failure(told.status == MHC_TIMEOUT ? MHC_TIMEOUT : MHC_PEER_FAILED, "rank 0 ended the meeting: " + sentence);
}

void Lobby::enter(Descriptor socket, Deadline deadline) {
    if (applicants_.size() >= kMaxApplicants)
        applicants_.erase(applicants_.begin());
    applicants_.emplace_back(std::move(socket), deadline);
}

void Lobby::step() {
    for (size_t i = 0; i < applicants_.size();) {
        Applicant& applicant = applicants_[i];
        Applicant::State const state = applicant.step(group_);
        if (state == Applicant::State::kWaiting && Clock::now() < applicant.deadline()) {
            ++i;
            continue;
        }
        if (state == Applicant::State::kProven) {
            int32_t const rank = applicant.rank();
            Link link = applicant.admit(group_);
            bool const fits = applicant.ranks() == group_.ranks && rank > 0 && rank < group_.ranks;
            std::string const peer = link.peer();
            if (fits && links_[static_cast<size_t>(rank)] == nullptr) {
                links_[static_cast<size_t>(rank)] = std::make_unique<Link>(std::move(link));
            } else {
                links_.push_back(std::make_unique<Link>(std::move(link)));  // is told why as well
                require(!fits, peer, " comes as rank ", rank, ", which is there already");
                fail(
                    MHC_INVALID_ARGUMENT, peer, " comes as rank ", rank, " of ", applicant.ranks(), " to a group of ",
                    group_.ranks, " ranks");
            }
        } else {
            ++refused_;
            lastRefused_ = applicant.peer();
        }
        applicants_.erase(applicants_.begin() + static_cast<std::ptrdiff_t>(i));
    }
}

std::string Lobby::absent() const {
    std::string text;
    for (size_t r = 1; r < links_.size(); ++r) {
        if (links_[r] == nullptr)
            text += (text.empty() ? "" : ", ") + std::to_string(r);
    }
    return text;
}

std::string Lobby::refusals() const {
    if (refused_ == 0)
        return "";
    return join(
        "; ", refused_, " connection(s) did not prove that they know the group's secret, the last from ", lastRefused_);
}

std::vector<int> Lobby::descriptors() const {
    std::vector<int> all;
    for (Applicant const& applicant : applicants_)
        all.push_back(applicant.descriptor());
    return all;
}

std::unique_ptr<Bootstrap> makeRendezvous(
    Place const& place, GroupIdentity const& group, int rank, milliseconds timeout) {
    require(
        !place.isTcp() || group.secret.size() >= kMinSecretBytes, "meeting at ", place.text(),
        " takes a secret of at least ", kMinSecretBytes,
        " characters that all ranks have: TRTLLM_MHC_SECRET_FILE or TRTLLM_MHC_SECRET (openssl rand -hex 16)");
    if (rank == 0)
        return std::make_unique<RankZero>(place, group, timeout);
    return std::make_unique<OtherRank>(place, group, rank, timeout);
}

}  // namespace mhc
