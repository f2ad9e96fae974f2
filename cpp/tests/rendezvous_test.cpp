// SPDX-License-Identifier: Apache-2.0
//
// Ranks that meet at a folder or at a TCP address: the right bytes, an end to every wait, and nobody else let in. The
// ranks are threads here, each with connections of its own; processes are in tests/unit/runtime/test_rendezvous.py.
#include "../src/rendezvous.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "../src/status.h"
#include "on_threads.h"

namespace mhc {
namespace {

using namespace std::chrono_literals;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

std::string const kSecret = "0123456789abcdef";

class TemporaryFolder {
public:
    TemporaryFolder() {
        char path[] = "/tmp/rendezvous_test_XXXXXX";
        path_ = mkdtemp(path);
    }
    ~TemporaryFolder() {
        std::error_code ignored;
        std::filesystem::remove_all(path_, ignored);
    }
    std::string const& path() const { return path_; }

private:
    std::string path_;
};

int freePort() {
    int const socket = ::socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    EXPECT_EQ(bind(socket, reinterpret_cast<sockaddr*>(&address), size), 0);
    EXPECT_EQ(getsockname(socket, reinterpret_cast<sockaddr*>(&address), &size), 0);
    close(socket);
    return ntohs(address.sin_port);
}

GroupIdentity group(int ranks, std::string const& secret = kSecret, std::string const& name = "group") {
    return {secret, name, ranks};
}

bool contains(std::string const& text, std::string const& part) {
    return text.find(part) != std::string::npos;
}

// Both kinds of places.
class Rendezvous : public testing::TestWithParam<char const*> {
protected:
    Place place(std::string const& name = "group") const {
        std::string const tcp = "tcp://" + host_ + ":" + std::to_string(port_);
        return Place(std::string(GetParam()) == "tcp" ? tcp : folder_.path(), name);
    }
    std::string host_ = "127.0.0.1";

private:
    TemporaryFolder folder_;
    int port_ = freePort();
};

INSTANTIATE_TEST_SUITE_P(, Rendezvous, testing::Values("folder", "tcp"), [](auto const& info) { return info.param; });

TEST_P(Rendezvous, ManyRoundsOfManySizesGiveEverybodysBytesInRankOrder) {
    constexpr int kRanks = 8;
    auto const errors = onThreads(kRanks, [&](int rank) {
        auto const meeting = makeRendezvous(place(), group(kRanks), rank, 20s);
        for (int round = 0; round < 200; ++round) {
            size_t const bytes = round % 40 == 0 ? 100000 : 1 + static_cast<size_t>(round) * 13;
            std::vector<uint8_t> const mine(bytes, static_cast<uint8_t>(17 * round + rank));
            std::vector<uint8_t> all(bytes * kRanks);
            meeting->allGather(mine.data(), all.data(), bytes);
            for (size_t i = 0; i < all.size(); ++i) {
                int const r = static_cast<int>(i / bytes);
                if (all[i] != static_cast<uint8_t>(17 * round + r))
                    fail(MHC_INVALID_ARGUMENT, "round ", round, ": rank ", r, "'s bytes are wrong");
            }
        }
    });
    EXPECT_EQ(errors, std::vector<std::string>(kRanks));
}

TEST_P(Rendezvous, RanksThatComeLateAreWaitedFor) {
    auto const errors = onThreads(3, [&](int rank) {
        std::this_thread::sleep_for(rank == 0 ? 150ms : rank * 60ms);
        EXPECT_EQ(makeRendezvous(place(), group(3), rank, 10s)->gather(rank, 3), (std::vector<int>{0, 1, 2}));
    });
    EXPECT_EQ(errors, std::vector<std::string>(3));
}

TEST_P(Rendezvous, APlaceCanBeUsedAgain) {
    for (int again = 0; again < 5; ++again) {
        auto const errors =
            onThreads(2, [&](int rank) { makeRendezvous(place(), group(2), rank, 10s)->gather(rank, 2); });
        EXPECT_EQ(errors, std::vector<std::string>(2));
    }
}

TEST_P(Rendezvous, AMissingRankIsNamedOnAllOthersWithinTheTimeOut) {
    auto const begin = steady_clock::now();
    auto const errors = onThreads(4, [&](int rank) {
        if (rank != 2)
            makeRendezvous(place(), group(4), rank, 500ms)->gather(rank, 4);
    });
    for (int const rank : {0, 1, 3})
        EXPECT_TRUE(contains(errors[static_cast<size_t>(rank)], "rank(s) 2 of 4 did not come")) << errors[rank];
    EXPECT_LT(steady_clock::now() - begin, 3s);
}

TEST_P(Rendezvous, AMissingRankZeroIsNamed) {
    auto const errors = onThreads(3, [&](int rank) {
        if (rank != 0)
            makeRendezvous(place(), group(3), rank, 300ms);
    });
    for (int const rank : {1, 2})
        EXPECT_TRUE(contains(errors[static_cast<size_t>(rank)], "rank 0 of 3 did not come to ")) << errors[rank];
}

TEST_P(Rendezvous, ARankThatEndsIsNoticedAtOnceAndNamedOnAllOthers) {
    auto const begin = steady_clock::now();
    auto const errors = onThreads(3, [&](int rank) {
        auto meeting = makeRendezvous(place(), group(3), rank, 20s);
        meeting->gather(rank, 3);
        if (rank == 1)
            return;
        meeting->gather(rank, 3);
    });
    for (int const rank : {0, 2}) {
        EXPECT_TRUE(contains(errors[static_cast<size_t>(rank)], "rank 1: the connection")) << errors[rank];
        EXPECT_TRUE(contains(errors[static_cast<size_t>(rank)], "was closed")) << errors[rank];
    }
    EXPECT_LT(steady_clock::now() - begin, 10s);
}

// A process of its own that joins and does nothing more.
pid_t joinInAProcess(Place const& place, int ranks, int rank) {
    pid_t const child = fork();
    if (child == 0) {
        try {
            auto const meeting = makeRendezvous(place, group(ranks), rank, 20s);
            pause();
        } catch (std::exception const&) {
        }
        _exit(1);
    }
    return child;
}

TEST_P(Rendezvous, AProcessThatIsKilledIsNoticedAtOnceAndNamed) {
    pid_t const child = joinInAProcess(place(), 2, 1);
    auto meeting = makeRendezvous(place(), group(2), 0, 20s);
    ASSERT_EQ(kill(child, SIGKILL), 0);
    auto const begin = steady_clock::now();
    try {
        meeting->gather(0, 2);
        ADD_FAILURE() << "the dead have answered";
    } catch (Failure const& failure) {
        EXPECT_TRUE(contains(failure.what(), "rank 1: the connection to ")) << failure.what();
        EXPECT_EQ(failure.status(), MHC_PEER_FAILED);
    }
    EXPECT_LT(steady_clock::now() - begin, 5s);
    waitpid(child, nullptr, 0);
}

TEST_P(Rendezvous, ARankZeroThatIsStoppedIsNotWaitedForWithoutAnEnd) {
    pid_t const child = joinInAProcess(place(), 2, 0);
    auto meeting = makeRendezvous(place(), group(2), 1, 500ms);
    ASSERT_EQ(kill(child, SIGSTOP), 0);
    auto const begin = steady_clock::now();
    try {
        meeting->gather(0, 2);
        ADD_FAILURE() << "the stopped have answered";
    } catch (Failure const& failure) {
        EXPECT_EQ(failure.status(), MHC_TIMEOUT);
        EXPECT_TRUE(contains(failure.what(), "rank 0 did not answer within 500 ms")) << failure.what();
    }
    EXPECT_LT(steady_clock::now() - begin, 3s);
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
}

TEST_P(Rendezvous, AfterAFailureNoCallWaits) {
    onThreads(2, [&](int rank) {
        auto meeting = makeRendezvous(place(), group(2), rank, 300ms);
        if (rank == 1) {
            std::this_thread::sleep_for(600ms);
            return;
        }
        EXPECT_THROW(meeting->gather(rank, 2), Failure);
        auto const begin = steady_clock::now();
        EXPECT_THROW(meeting->gather(rank, 2), Failure);
        EXPECT_LT(steady_clock::now() - begin, 100ms);
    });
}

TEST_P(Rendezvous, RanksInDifferentCallsFindOut) {
    auto const errors = onThreads(2, [&](int rank) {
        auto meeting = makeRendezvous(place(), group(2), rank, 10s);
        if (rank == 0)
            meeting->gather(int32_t{1}, 2);
        else
            meeting->gather(int64_t{1}, 2);
    });
    for (std::string const& error : errors)
        EXPECT_TRUE(contains(error, "not in the same call")) << error;
}

TEST_P(Rendezvous, AnotherNumberOfRanksIsAnErrorOnBoth) {
    auto const errors = onThreads(2, [&](int rank) {
        makeRendezvous(place(), group(rank == 0 ? 2 : 4), rank, 10s)->gather(rank, rank == 0 ? 2 : 4);
    });
    for (std::string const& error : errors)
        EXPECT_TRUE(contains(error, "comes as rank 1 of 4 to a group of 2 ranks")) << error;
}

TEST_P(Rendezvous, TheSameRankTwiceIsAnErrorOnAll) {
    auto const errors = onThreads(3, [&](int thread) {
        int const rank = thread == 0 ? 0 : 1;
        makeRendezvous(place(), group(3), rank, 10s)->gather(rank, 3);
    });
    for (std::string const& error : errors)
        EXPECT_TRUE(contains(error, "comes as rank 1, which is there already")) << error;
}

TEST_P(Rendezvous, AnotherSecretIsRefused) {
    auto const errors = onThreads(2, [&](int rank) {
        makeRendezvous(place(), group(2, rank == 0 ? kSecret : "fedcba9876543210"), rank, 700ms)->gather(rank, 2);
    });
    EXPECT_TRUE(contains(errors[0], "rank(s) 1 of 2 did not come")) << errors[0];
    EXPECT_TRUE(contains(errors[0], "1 connection(s) did not prove that they know the group's secret")) << errors[0];
    EXPECT_TRUE(contains(errors[1], "refused this rank: it has another secret")) << errors[1];
    for (std::string const& error : errors) {
        EXPECT_FALSE(contains(error, kSecret)) << error;
        EXPECT_FALSE(contains(error, "fedcba9876543210")) << error;
    }
}

TEST_P(Rendezvous, AnotherGroupIsRefused) {
    auto const errors = onThreads(2, [&](int rank) {
        makeRendezvous(place(), group(2, kSecret, rank == 0 ? "a" : "b"), rank, 500ms)->gather(rank, 2);
    });
    EXPECT_TRUE(contains(errors[1], "is of another job or group")) << errors[1];
}

// Whoever connects and says nothing, or nonsense, keeps nobody out.
TEST_P(Rendezvous, StrangersDoNotDisturb) {
    std::atomic<bool> done{false};
    std::thread strangers([&] {
        std::vector<Descriptor> open;
        while (!done) {
            if (auto socket = place().connect()) {
                std::string const nonsense(open.size() % 3 * 40, 'x');
                send(socket->get(), nonsense.data(), nonsense.size(), MSG_NOSIGNAL);
                open.push_back(std::move(*socket));
                if (open.size() > 100)
                    open.clear();
            }
            std::this_thread::sleep_for(1ms);
        }
    });
    auto const errors = onThreads(2, [&](int rank) {
        std::this_thread::sleep_for(rank * 400ms);
        makeRendezvous(place(), group(2), rank, 20s)->gather(rank, 2);
    });
    done = true;
    strangers.join();
    EXPECT_EQ(errors, std::vector<std::string>(2));
}

// Somebody who has taken rank 0's place and does not know the secret.
TEST_P(Rendezvous, AFalseRankZeroLearnsNothingAndIsFoundOut) {
    Descriptor const listening = place().listen();
    std::thread impostor([&] {
        for (auto const end = steady_clock::now() + 5s; steady_clock::now() < end;) {
            auto socket = place().accept(listening);
            if (!socket) {
                std::this_thread::sleep_for(1ms);
                continue;
            }
            Applicant applicant(std::move(*socket), steady_clock::now() + 5s);
            GroupIdentity const other = group(2, "not the secret at all");
            while (applicant.step(other) == Applicant::State::kWaiting)
                std::this_thread::sleep_for(1ms);
            applicant.admit(other);
            return;
        }
    });
    auto const begin = steady_clock::now();
    try {
        makeRendezvous(place(), group(2), 1, 5s);
        ADD_FAILURE() << "the impostor was believed";
    } catch (Failure const& failure) {
        EXPECT_TRUE(contains(failure.what(), "does not know the group's secret")) << failure.what();
    }
    EXPECT_LT(steady_clock::now() - begin, 4s);
    impostor.join();
}

TEST_P(Rendezvous, ASecondRankZeroIsRefused) {
    Descriptor const listening = place().listen();
    EXPECT_THROW(place().listen(), Failure);
}

TEST(RendezvousFolder, IsMadePrivateAndLeftEmpty) {
    TemporaryFolder const folder;
    std::string const path = folder.path() + "/made";
    auto const errors = onThreads(2, [&](int rank) {
        makeRendezvous(Place(path, "g"), group(2), rank, 10s)->gather(rank, 2);
        struct stat info{};
        EXPECT_EQ(stat(path.c_str(), &info), 0);
        EXPECT_EQ(info.st_mode & 07777u, 0700u);
    });
    EXPECT_EQ(errors, std::vector<std::string>(2));
    EXPECT_TRUE(std::filesystem::is_empty(path));
}

TEST(RendezvousFolder, TheSocketIsItsUsersAlone) {
    TemporaryFolder const folder;
    Place const place(folder.path(), "g");
    Descriptor const listening = place.listen();
    struct stat info{};
    ASSERT_EQ(stat((folder.path() + "/g").c_str(), &info), 0);
    EXPECT_EQ(info.st_mode & 07777u, 0600u);
}

TEST(RendezvousFolder, MustBelongToItsUserAlone) {
    TemporaryFolder const folder;
    for (mode_t const mode : {0777, 01777, 0755, 0710, 0702}) {
        ASSERT_EQ(chmod(folder.path().c_str(), mode), 0);
        for (int const rank : {0, 1}) {
            try {
                makeRendezvous(Place(folder.path(), "g"), group(2), rank, 200ms);
                ADD_FAILURE() << "accepted";
            } catch (Failure const& failure) {
                EXPECT_EQ(failure.status(), MHC_INVALID_ARGUMENT);
                EXPECT_TRUE(contains(failure.what(), "others could join the group; chmod 0700 ")) << failure.what();
            }
        }
    }
}

TEST(RendezvousFolder, OthersFoldersAreRefused) {
    if (geteuid() != 0)
        GTEST_SKIP() << "only root can make a folder of another user";
    TemporaryFolder const folder;
    ASSERT_EQ(chown(folder.path().c_str(), 12345, 12345), 0);
    try {
        Place(folder.path(), "g").listen();
        ADD_FAILURE() << "accepted";
    } catch (Failure const& failure) {
        EXPECT_TRUE(contains(failure.what(), "belongs to user 12345, expected this process's")) << failure.what();
    }
}

TEST(RendezvousFolder, SymbolicLinksAndFilesAreRefused) {
    TemporaryFolder const folder;
    std::string const real = folder.path() + "/real", link = folder.path() + "/link", file = folder.path() + "/file";
    ASSERT_EQ(mkdir(real.c_str(), 0700), 0);
    ASSERT_EQ(symlink(real.c_str(), link.c_str()), 0);
    std::ofstream(file) << "x";
    for (std::string const& path : {link, file}) {
        try {
            Place(path, "g").listen();
            ADD_FAILURE() << "accepted " << path;
        } catch (Failure const& failure) {
            EXPECT_TRUE(contains(failure.what(), "not a symbolic link or a file")) << failure.what();
        }
    }
    // Neither is a link in the socket's place followed.
    ASSERT_EQ(symlink("/tmp/elsewhere", (real + "/g").c_str()), 0);
    EXPECT_THROW(Place(real, "g").connect(), Failure);
}

TEST(RendezvousFolder, ASocketThatAKilledProcessLeftIsNoObstacle) {
    TemporaryFolder const folder;
    {
        Descriptor const left = Place(folder.path(), "g").listen();
    }
    ASSERT_TRUE(std::filesystem::exists(folder.path() + "/g"));
    auto const errors = onThreads(
        2, [&](int rank) { makeRendezvous(Place(folder.path(), "g"), group(2), rank, 10s)->gather(rank, 2); });
    EXPECT_EQ(errors, std::vector<std::string>(2));
}

TEST(RendezvousFolder, GroupsOfOneFolderDoNotMeet) {
    TemporaryFolder const folder;
    auto const errors = onThreads(4, [&](int thread) {
        std::string const name = thread % 2 == 0 ? "even" : "odd";
        std::vector<int> const all =
            makeRendezvous(Place(folder.path(), name), group(2, "", name), thread / 2, 10s)->gather(thread, 2);
        EXPECT_EQ(all, (std::vector<int>{thread % 2, 2 + thread % 2}));
    });
    EXPECT_EQ(errors, std::vector<std::string>(4));
}

TEST(RendezvousTcp, TakesASecretThatIsLongEnough) {
    for (std::string const& secret : {std::string(), std::string(kMinSecretBytes - 1, 's')}) {
        try {
            makeRendezvous(Place("tcp://127.0.0.1:1", "g"), group(2, secret), 0, 100ms);
            ADD_FAILURE() << "accepted";
        } catch (Failure const& failure) {
            EXPECT_TRUE(contains(failure.what(), "takes a secret of at least 16 characters")) << failure.what();
        }
    }
}

TEST(RendezvousTcp, ListensAtTheGivenAddressOnly) {
    int const port = freePort();
    Descriptor const listening = Place("tcp://127.0.0.1:" + std::to_string(port), "g").listen();
    EXPECT_TRUE(Place("tcp://127.0.0.1:" + std::to_string(port), "g").connect());
    EXPECT_FALSE(Place("tcp://127.0.0.2:" + std::to_string(port), "g").connect());
}

TEST(RendezvousTcp, AddressesAreReadStrictly) {
    EXPECT_EQ(Place("tcp://127.0.0.1:80", "g").text(), "tcp://127.0.0.1:80");
    EXPECT_EQ(Place("tcp://localhost:80", "g", 4).text(), "tcp://localhost:84");
    EXPECT_EQ(Place("tcp://[::1]:80", "g").text(), "tcp://[::1]:80");
    for (char const* const bad :
         {"", "relative/folder", "udp://127.0.0.1:80", "tcp://", "tcp://:80", "tcp://127.0.0.1",
          "tcp://127.0.0.1:", "tcp://127.0.0.1:0", "tcp://127.0.0.1:65536", "tcp://127.0.0.1:99999999999999999999",
          "tcp://127.0.0.1:8 0", "tcp://127.0.0.1:-1", "tcp://example.org:80", "tcp://0.0.0.0:80", "tcp://[::]:80"})
        EXPECT_THROW(Place(bad, "g"), Failure) << bad;
    EXPECT_THROW(Place("tcp://127.0.0.1:65535", "g", 1), Failure);
}

TEST(SecretFile, MustBeItsUsersAlone) {
    TemporaryFolder const folder;
    std::string const path = folder.path() + "/secret";
    std::ofstream(path) << kSecret << "\nsecond line\n";
    ASSERT_EQ(chmod(path.c_str(), 0600), 0);
    EXPECT_EQ(readSecretFile(path), kSecret);
    for (mode_t const mode : {0644, 0640, 0602}) {
        ASSERT_EQ(chmod(path.c_str(), mode), 0);
        try {
            readSecretFile(path);
            ADD_FAILURE() << "accepted";
        } catch (Failure const& failure) {
            EXPECT_TRUE(contains(failure.what(), "chmod 0600")) << failure.what();
            EXPECT_FALSE(contains(failure.what(), kSecret));
        }
    }
    std::string const link = folder.path() + "/link";
    ASSERT_EQ(chmod(path.c_str(), 0600), 0);
    ASSERT_EQ(symlink(path.c_str(), link.c_str()), 0);
    EXPECT_THROW(readSecretFile(link), Failure);
    EXPECT_THROW(readSecretFile(folder.path()), Failure);
    EXPECT_THROW(readSecretFile(folder.path() + "/missing"), Failure);
}

// A connection's two ends, past the handshake.
std::pair<Link, Link> linked() {
    int ends[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends), 0);
    auto const deadline = steady_clock::now() + 5s;
    Applicant applicant{Descriptor(ends[0]), deadline};
    std::vector<Link> other;
    std::thread thread([&] { other.push_back(applyTo(Descriptor(ends[1]), group(2), 1, "here", deadline)); });
    while (applicant.step(group(2)) == Applicant::State::kWaiting)
        std::this_thread::sleep_for(1ms);
    Link mine = applicant.admit(group(2));
    thread.join();
    return {std::move(mine), std::move(other.front())};
}

TEST(RendezvousLink, MessagesThatAreChangedRepeatedOrTooLongAreFoundOut) {
    auto const deadline = steady_clock::now() + 5s;
    std::string const text = "text";
    {
        auto [zero, one] = linked();
        ASSERT_TRUE(one.send(MessageKind::kContribution, text.data(), text.size(), deadline));
        Link::Message message{};
        ASSERT_TRUE(zero.receive(message, 100));
        EXPECT_EQ(message.payload, std::vector<uint8_t>(text.begin(), text.end()));
        ASSERT_TRUE(one.send(MessageKind::kContribution, text.data(), text.size(), deadline));
        EXPECT_THROW(zero.receive(message, 3), Failure);
    }
    for (size_t at = 0; at < 44; ++at) {
        auto [zero, one] = linked();
        ASSERT_TRUE(one.send(MessageKind::kContribution, text.data(), text.size(), deadline));
        std::vector<uint8_t> bytes(44);
        ASSERT_EQ(recv(zero.descriptor(), bytes.data(), bytes.size(), 0), 44);
        bytes[at] ^= 1;
        ASSERT_EQ(send(one.descriptor(), bytes.data(), bytes.size(), 0), 44);
        Link::Message message{};
        if (at >= 4 && at < 8) {  // the length: what it says may also not have come yet
            try {
                EXPECT_FALSE(zero.receive(message, 100));
            } catch (Failure const&) {
            }
        } else {
            EXPECT_THROW(zero.receive(message, 100), Failure) << at;
        }
    }
    {
        auto [zero, one] = linked();
        ASSERT_TRUE(one.send(MessageKind::kContribution, text.data(), text.size(), deadline));
        std::vector<uint8_t> bytes(44);
        ASSERT_EQ(recv(zero.descriptor(), bytes.data(), bytes.size(), 0), 44);
        ASSERT_EQ(send(one.descriptor(), bytes.data(), bytes.size(), 0), 44);
        ASSERT_EQ(send(one.descriptor(), bytes.data(), bytes.size(), 0), 44);
        Link::Message message{};
        EXPECT_TRUE(zero.receive(message, 100));
        EXPECT_THROW(zero.receive(message, 100), Failure);
    }
}

}  // namespace
}  // namespace mhc
