// SPDX-License-Identifier: Apache-2.0
//
// What strangers and broken ranks send to a meeting of processes, and what stands in the variables that lead there. The
// first byte of the input says which:
//   0  bytes of a stranger, to rank 0's lobby
//   1  a rank that knows the secret, with a rank and a number of ranks that the input chooses
//   2  messages of such a rank, of any kind and length, then raw bytes
//   3  the variables of a launcher
#include <sys/socket.h>

#include <chrono>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "environment.h"
#include "input.h"
#include "rendezvous.h"
#include "status.h"

namespace {

using namespace mhc;
using Clock = std::chrono::steady_clock;

GroupIdentity group(int32_t ranks) {
    return {"the secret of this group", "group", ranks};
}

struct Ends {
    Descriptor zero;
    Descriptor other;
    Ends() {
        int ends[2];
        if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends) != 0)
            __builtin_trap();
        zero = Descriptor(ends[0]);
        other = Descriptor(ends[1]);
    }
};

void sendRaw(int descriptor, std::string const& bytes) {
    [[maybe_unused]] ssize_t const sent = send(descriptor, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
}

// Sentences go to a terminal and to other ranks.
void check(std::string const& sentence) {
    bool const printable = std::none_of(
        sentence.begin(), sentence.end(), [](unsigned char c) { return c < 0x20 && c != '\n' && c != '\t'; });
    if (sentence.empty() || sentence.size() > 2000 || !printable)
        __builtin_trap();
}

void stranger(Input& input) {
    Lobby lobby(group(2));
    Ends ends;
    lobby.enter(std::move(ends.zero), Clock::now() + std::chrono::seconds(5));
    while (!input.empty()) {
        sendRaw(ends.other.get(), input.text(1u + input.byte()));
        lobby.step();
    }
    if (lobby.complete())
        __builtin_trap();  // nobody has proven anything
}

void knowsTheSecret(Input& input) {
    int32_t const rank = static_cast<int8_t>(input.byte()), ranks = static_cast<int8_t>(input.byte());
    Lobby lobby(group(4));
    Ends ends;
    auto const deadline = Clock::now() + std::chrono::seconds(5);
    lobby.enter(std::move(ends.zero), deadline);
    std::thread other([&] {
        try {
            applyTo(std::move(ends.other), group(ranks), rank, "here", deadline);
        } catch (Failure const& failure) {
            check(failure.what());
        }
    });
    try {
        std::string const before = lobby.absent();
        while (lobby.absent() == before && lobby.refusals().empty())
            lobby.step();
        if (!(rank > 0 && rank < 4 && ranks == 4))
            __builtin_trap();
    } catch (Failure const& failure) {
        check(failure.what());
    }
    lobby.links().clear();
    other.join();
}

void messages(Input& input) {
    Ends ends;
    auto const deadline = Clock::now() + std::chrono::seconds(5);
    Applicant applicant(std::move(ends.zero), deadline);
    std::vector<Link> other;
    std::thread thread([&] { other.push_back(applyTo(std::move(ends.other), group(2), 1, "here", deadline)); });
    while (applicant.step(group(2)) == Applicant::State::kWaiting)
        std::this_thread::yield();
    Link zero = applicant.admit(group(2));
    thread.join();
    size_t const limit = input.byte();
    for (int count = input.byte() % 4; count > 0; --count) {
        auto const kind = static_cast<MessageKind>(input.byte());
        std::string const payload = input.text(input.byte());
        other.front().send(kind, payload.data(), payload.size(), deadline);
    }
    sendRaw(other.front().descriptor(), input.rest());
    other.clear();
    try {
        Link::Message message{};
        while (zero.receive(message, limit)) {
            if (message.payload.size() > limit)
                __builtin_trap();
            check(readFailure(message.payload).what());
        }
    } catch (Failure const& failure) {
        check(failure.what());
    }
}

void variables(Input& input) {
    static char const* const names[] = {
        "TRTLLM_MHC_RANK",
        "TRTLLM_MHC_WORLD_SIZE",
        "TRTLLM_MHC_DEVICE",
        "TRTLLM_MHC_RENDEZVOUS",
        "TRTLLM_MHC_CAPACITY",
        "TRTLLM_MHC_TIMEOUT_MS",
        "TRTLLM_MHC_ON_ERROR",
        "TRTLLM_MHC_SECRET",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "MASTER_PORT",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "TRTLLM_MHC_LOCAL_RANK",
        "TRTLLM_MHC_JOB"};
    std::map<std::string, std::string> table;
    mhcCommConfig config{};
    config.struct_size = sizeof(config);
    config.tp_size = 1 << (input.byte() % 4);
    config.rank = config.device = config.on_error = -1;
    config.hidden_size = 4096;
    config.lanes = 1;
    while (!input.empty()) {
        char const* const name = names[input.byte() % std::size(names)];
        std::string value = input.text(input.byte() % 64);
        table[name] = value.substr(0, value.find('\0'));  // as an environment holds it
    }
    try {
        EnvironmentGroup const read = readEnvironmentGroup(&config, [&](char const* name) -> char const* {
            auto const found = table.find(name);
            return found == table.end() ? nullptr : found->second.c_str();
        });
        if (read.settings.rank < 0 || read.settings.rank >= config.tp_size)
            __builtin_trap();
    } catch (Failure const& failure) {
        if (std::strlen(failure.what()) == 0 || std::strlen(failure.what()) > 2000)
            __builtin_trap();
    }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(uint8_t const* data, size_t size) {
    Input input(data, size);
    switch (input.byte() % 4) {
        case 0:
            stranger(input);
            break;
        case 1:
            knowsTheSecret(input);
            break;
        case 2:
            messages(input);
            break;
        default:
            variables(input);
    }
    return 0;
}
