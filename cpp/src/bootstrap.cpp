// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>

#include "bootstrap.h"
#include "status.h"

namespace mhc {
namespace {

// Where the threads of one group exchange bytes, one round after another.
class Meeting {
public:
    explicit Meeting(int ranks) : ranks_(ranks), present_(static_cast<size_t>(ranks), false) {}

    void join(int rank) {
        std::lock_guard<std::mutex> const lock(mutex_);
        if (joined_.size() != present_.size())
            joined_.assign(present_.size(), false);
        require(!joined_[static_cast<size_t>(rank)], "rank ", rank, " joined its group twice: ranks must differ");
        joined_[static_cast<size_t>(rank)] = true;
    }

    int ranks() const { return ranks_; }

    void allGather(int rank, void const* send, void* receive, size_t bytes, std::chrono::milliseconds timeout) {
        std::unique_lock<std::mutex> lock(mutex_);
        auto const end = std::chrono::steady_clock::now() + timeout;
        // The round before must have been read by all before its bytes may go.
        waitUntil(lock, end, [&] { return broken_ || !draining_; }, timeout);
        if (arrived_ == 0) {
            bytes_ = bytes;
            data_.assign(bytes * static_cast<size_t>(ranks_), 0);
        }
        if (bytes != bytes_) {
            breakUp();
            fail(
                MHC_PEER_FAILED, "rank ", rank, " exchanges ", bytes, " bytes where another rank exchanges ", bytes_,
                ": the ranks are not in the same call");
        }
        std::memcpy(data_.data() + bytes * static_cast<size_t>(rank), send, bytes);
        present_[static_cast<size_t>(rank)] = true;
        if (++arrived_ == ranks_) {
            draining_ = true;
            toRead_ = ranks_;
            changed_.notify_all();
        }
        waitUntil(lock, end, [&] { return broken_ || draining_; }, timeout);
        std::memcpy(receive, data_.data(), data_.size());
        if (--toRead_ == 0) {
            draining_ = false;
            arrived_ = 0;
            std::fill(present_.begin(), present_.end(), false);
            changed_.notify_all();
        }
    }

private:
    template <typename Condition>
    void waitUntil(
        std::unique_lock<std::mutex>& lock, std::chrono::steady_clock::time_point end, Condition condition,
        std::chrono::milliseconds timeout) {
        if (!changed_.wait_until(lock, end, condition)) {
            std::string absent;
            for (int r = 0; r < ranks_; ++r) {
                if (!present_[static_cast<size_t>(r)])
                    absent += (absent.empty() ? "" : ", ") + std::to_string(r);
            }
            breakUp();
            fail(MHC_TIMEOUT, "rank(s) ", absent, " of ", ranks_, " did not come within ", timeout.count(), " ms");
        }
        if (broken_)
            fail(MHC_PEER_FAILED, "another rank of the group gave up waiting");
    }

    // One rank has given up: the others must not wait for it.
    void breakUp() {
        broken_ = true;
        changed_.notify_all();
    }

    int const ranks_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::vector<char> data_;
    std::vector<bool> present_;
    std::vector<bool> joined_;
    size_t bytes_ = 0;
    int arrived_ = 0;
    int toRead_ = 0;
    bool draining_ = false;
    bool broken_ = false;
};

// Meetings by name, as long as somebody is in them.
std::shared_ptr<Meeting> meetingOf(std::string const& name, int rank, int ranks) {
    static std::mutex mutex;
    static std::map<std::string, std::weak_ptr<Meeting>> meetings;
    std::lock_guard<std::mutex> const lock(mutex);
    std::shared_ptr<Meeting> meeting = meetings[name].lock();
    if (!meeting) {
        meeting = std::make_shared<Meeting>(ranks);
        meetings[name] = meeting;
    }
    require(
        meeting->ranks() == ranks, "rank ", rank, " joins the group '", name, "' as one of ", ranks,
        " ranks, but another rank made it for ", meeting->ranks());
    meeting->join(rank);
    return meeting;
}

class ThreadBootstrap : public Bootstrap {
public:
    ThreadBootstrap(std::string const& name, int rank, int ranks, std::chrono::milliseconds timeout)
        : meeting_(meetingOf(name, rank, ranks)), rank_(rank), timeout_(timeout) {}

    void allGather(void const* send, void* receive, size_t bytes) override {
        meeting_->allGather(rank_, send, receive, bytes, timeout_);
    }

private:
    std::shared_ptr<Meeting> meeting_;
    int rank_;
    std::chrono::milliseconds timeout_;
};

class CallbackBootstrap : public Bootstrap {
public:
    CallbackBootstrap(mhcAllGatherFn allGather, void* context) : allGather_(allGather), context_(context) {}

    void allGather(void const* send, void* receive, size_t bytes) override {
        int const result = allGather_(context_, send, receive, bytes);
        if (result != 0) {
            fail(
                MHC_PEER_FAILED, "the all-gather supplied by the caller failed with ", result, " (", bytes,
                " bytes a rank)");
        }
    }

private:
    mhcAllGatherFn allGather_;
    void* context_;
};

}  // namespace

std::unique_ptr<Bootstrap> makeThreadBootstrap(
    std::string const& name, int rank, int ranks, std::chrono::milliseconds timeout) {
    return std::make_unique<ThreadBootstrap>(name, rank, ranks, timeout);
}

std::unique_ptr<Bootstrap> makeCallbackBootstrap(mhcAllGatherFn allGather, void* context) {
    return std::make_unique<CallbackBootstrap>(allGather, context);
}

}  // namespace mhc
