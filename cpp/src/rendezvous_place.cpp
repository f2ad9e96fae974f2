// SPDX-License-Identifier: Apache-2.0
#include "rendezvous_place.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "status.h"

namespace mhc {
namespace {

constexpr size_t kMaxSecretBytes = 4096;

std::string errorText() {
    return std::strerror(errno);
}

// The folder, made when it is missing. What is checked is what was opened, so that nobody can put another in its place.
Descriptor openPrivateFolder(std::string const& path) {
    if (mkdir(path.c_str(), 0700) != 0 && errno != EEXIST)
        fail(MHC_INVALID_ARGUMENT, "making the rendezvous folder ", path, ": ", errorText());
    Descriptor folder(open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
    if (!folder) {
        bool const link = errno == ELOOP || errno == ENOTDIR;
        fail(
            MHC_INVALID_ARGUMENT, "opening the rendezvous folder ", path, ": ", errorText(),
            link ? " (a folder is expected, not a symbolic link or a file)" : "");
    }
    struct stat info{};
    require(fstat(folder.get(), &info) == 0, "looking at the rendezvous folder ", path, ": ", errorText());
    require(
        info.st_uid == geteuid(), "the rendezvous folder ", path, " belongs to user ", info.st_uid,
        ", expected this process's, ", geteuid(), ": name a folder of your own (TRTLLM_MHC_RENDEZVOUS)");
    char mode[8];
    std::snprintf(mode, sizeof(mode), "%04o", info.st_mode & 07777u);
    require(
        (info.st_mode & 0077u) == 0, "the rendezvous folder ", path, " has mode ", mode,
        ": others could join the group; chmod 0700 ", path);
    return folder;
}

struct UnixAddress {
    sockaddr_un address{};
    // Through the opened folder: the path stays short, and is that of the folder that was checked.
    UnixAddress(Descriptor const& folder, std::string const& name) {
        address.sun_family = AF_UNIX;
        std::string const path = join("/proc/self/fd/", folder.get(), "/", name);
        require(path.size() < sizeof(address.sun_path), "the socket's path is too long: ", path);
        std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
    }
    sockaddr const* get() const { return reinterpret_cast<sockaddr const*>(&address); }
};

using AddressList = std::unique_ptr<addrinfo, void (*)(addrinfo*)>;

// Numeric addresses only: the answer to a look-up is somebody else's.
AddressList resolve(std::string const& host, uint16_t port) {
    addrinfo hints{};
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
    addrinfo* found = nullptr;
    std::string const address = host == "localhost" ? "127.0.0.1" : host;
    int const status = getaddrinfo(address.c_str(), std::to_string(port).c_str(), &hints, &found);
    require(
        status == 0 && found != nullptr, "the rendezvous address ", host,
        " is not numeric: expected for example 127.0.0.1 or [::1]");
    return {found, freeaddrinfo};
}

Descriptor makeSocket(int family) {
    Descriptor made(socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!made)
        fail(MHC_INVALID_ARGUMENT, "making a socket: ", errorText());
    return made;
}

bool sameUser(Descriptor const& connection) {
    ucred peer{};
    socklen_t size = sizeof(peer);
    return getsockopt(connection.get(), SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && peer.uid == geteuid();
}

void sendAtOnce(Descriptor const& connection) {
    int const on = 1;
    setsockopt(connection.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

bool connected(Descriptor const& socket, sockaddr const* address, socklen_t size) {
    if (connect(socket.get(), address, size) == 0)
        return true;
    if (errno != EINPROGRESS)
        return false;
    // Whoever listens answers soon; if not, the caller tries again.
    pollfd waiting{socket.get(), POLLOUT, 0};
    if (poll(&waiting, 1, 1000) != 1)
        return false;
    int error = 0;
    socklen_t bytes = sizeof(error);
    return getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &bytes) == 0 && error == 0;
}

}  // namespace

Descriptor::~Descriptor() {
    if (number_ >= 0)
        close(number_);
}

Place::Place(std::string const& text, std::string name, int portOffset) : name_(std::move(name)) {
    std::string const scheme = "tcp://";
    if (text.compare(0, scheme.size(), scheme) != 0) {
        require(
            !text.empty() && text[0] == '/', "a rendezvous is the absolute path of a folder or tcp://HOST:PORT, got '",
            text, "'");
        folder_ = text;
        text_ = folder_ + "/" + name_;
        return;
    }
    size_t const colon = text.rfind(':');
    std::string const digits = text.substr(colon + 1);
    bool const numeric =
        !digits.empty() && digits.size() <= 5 && digits.find_first_not_of("0123456789") == std::string::npos;
    require(colon >= scheme.size() && numeric, "expected tcp://HOST:PORT, got '", text, "'");
    host_ = text.substr(scheme.size(), colon - scheme.size());
    if (host_.size() > 2 && host_.front() == '[' && host_.back() == ']')
        host_ = host_.substr(1, host_.size() - 2);
    int const port = std::stoi(digits) + portOffset;
    require(
        std::stoi(digits) > 0 && port <= 65535, "the rendezvous port must be in 1 .. 65535, got ", digits,
        portOffset > 0 ? join(" + ", portOffset, " for this group") : "");
    port_ = static_cast<uint16_t>(port);
    resolve(host_, port_);
    require(
        host_ != "0.0.0.0" && host_ != "::", "the rendezvous address must be the one of rank 0 that others reach, got ",
        host_);
    text_ = join("tcp://", host_.find(':') == std::string::npos ? host_ : "[" + host_ + "]", ":", port_);
}

Descriptor Place::listen() const {
    if (isTcp()) {
        AddressList const at = resolve(host_, port_);
        Descriptor made = makeSocket(at->ai_family);
        int const on = 1;
        setsockopt(made.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
        if (bind(made.get(), at->ai_addr, at->ai_addrlen) != 0 || ::listen(made.get(), 64) != 0) {
            fail(
                MHC_INVALID_ARGUMENT, "listening at ", text_, ": ", errorText(),
                errno == EADDRINUSE ? " (another group's rank 0, or another program: choose another port)" : "");
        }
        return made;
    }
    Descriptor const folder = openPrivateFolder(folder_);
    UnixAddress const at(folder, name_);
    Descriptor made = makeSocket(AF_UNIX);
    if (bind(made.get(), at.get(), sizeof(at.address)) != 0) {
        // A socket that nobody listens at is what a process left that was killed here.
        require(
            errno == EADDRINUSE, "making the socket ", text_, ": ", errorText(),
            " (the folder must be on a local file system)");
        require(!connect(), "another process is rank 0 of this group at ", text_);
        unlinkat(folder.get(), name_.c_str(), 0);
        require(bind(made.get(), at.get(), sizeof(at.address)) == 0, "making the socket ", text_, ": ", errorText());
    }
    // Until it listens nobody can connect, whatever the mode was before.
    require(fchmodat(folder.get(), name_.c_str(), 0600, 0) == 0, "closing the socket to others: ", errorText());
    require(::listen(made.get(), 64) == 0, "listening at ", text_, ": ", errorText());
    return made;
}

std::optional<Descriptor> Place::connect() const {
    if (isTcp()) {
        AddressList const at = resolve(host_, port_);
        Descriptor made = makeSocket(at->ai_family);
        if (!connected(made, at->ai_addr, at->ai_addrlen))
            return std::nullopt;
        sendAtOnce(made);
        return made;
    }
    Descriptor const folder = openPrivateFolder(folder_);
    struct stat info{};
    if (fstatat(folder.get(), name_.c_str(), &info, AT_SYMLINK_NOFOLLOW) != 0)
        return std::nullopt;
    require(
        S_ISSOCK(info.st_mode) && info.st_uid == geteuid(), text_,
        " is not a socket of this user: something else has been put there");
    UnixAddress const at(folder, name_);
    Descriptor made = makeSocket(AF_UNIX);
    if (!connected(made, at.get(), sizeof(at.address)))
        return std::nullopt;
    require(sameUser(made), "rank 0 at ", text_, " is another user's process");
    return made;
}

std::optional<Descriptor> Place::accept(Descriptor const& listening) const {
    Descriptor made(accept4(listening.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!made || (!isTcp() && !sameUser(made)))
        return std::nullopt;
    if (isTcp())
        sendAtOnce(made);
    return made;
}

void Place::leave() const noexcept {
    if (isTcp())
        return;
    Descriptor const folder(open(folder_.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
    if (folder)
        unlinkat(folder.get(), name_.c_str(), 0);
}

std::string peerName(Descriptor const& connection) {
    sockaddr_storage address{};
    socklen_t size = sizeof(address);
    if (getpeername(connection.get(), reinterpret_cast<sockaddr*>(&address), &size) != 0)
        return "a closed connection";
    if (address.ss_family == AF_UNIX) {
        ucred peer{};
        socklen_t bytes = sizeof(peer);
        getsockopt(connection.get(), SOL_SOCKET, SO_PEERCRED, &peer, &bytes);
        return join("process ", peer.pid);
    }
    char host[INET6_ADDRSTRLEN] = "?";
    bool const six = address.ss_family == AF_INET6;
    void const* const raw = six ? static_cast<void const*>(&reinterpret_cast<sockaddr_in6&>(address).sin6_addr)
                                : &reinterpret_cast<sockaddr_in&>(address).sin_addr;
    inet_ntop(address.ss_family, raw, host, sizeof(host));
    uint16_t const port =
        six ? reinterpret_cast<sockaddr_in6&>(address).sin6_port : reinterpret_cast<sockaddr_in&>(address).sin_port;
    return join(host, ":", ntohs(port));
}

std::string readSecretFile(std::string const& path) {
    Descriptor const file(open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK));
    if (!file)
        fail(MHC_INVALID_ARGUMENT, "opening the file of the group's secret, ", path, ": ", errorText());
    struct stat info{};
    require(
        fstat(file.get(), &info) == 0 && S_ISREG(info.st_mode), "the group's secret ", path, " is not a plain file");
    require(
        info.st_uid == geteuid() && (info.st_mode & 0077u) == 0, "the file of the group's secret, ", path,
        ", must belong to this process's user and to nobody else: chmod 0600 ", path);
    std::string secret(kMaxSecretBytes, '\0');
    ssize_t const count = read(file.get(), secret.data(), secret.size());
    require(count >= 0, "reading the group's secret from ", path, ": ", errorText());
    secret.resize(static_cast<size_t>(count));
    return secret.substr(0, secret.find_first_of("\r\n"));
}

}  // namespace mhc
