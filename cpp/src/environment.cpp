// SPDX-License-Identifier: Apache-2.0
#include "environment.h"

#include <cuda_runtime_api.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "rendezvous.h"
#include "status.h"

namespace mhc {
namespace {

constexpr int32_t kDefaultCapacity = 64;
constexpr int32_t kMaxWorld = 1 << 20;
// The ranks are threads of this process.
constexpr char kInProcess[] = "threads";

std::string valueOf(Variables const& variables, char const* name) {
    char const* const value = variables(name);
    return value == nullptr ? "" : value;
}

std::optional<int32_t> numberOf(Variables const& variables, char const* name, int32_t minimum, int32_t maximum) {
    std::string const text = valueOf(variables, name);
    if (text.empty())
        return std::nullopt;
    int32_t value = 0;
    char const* const end = text.data() + text.size();
    auto const [stop, error] = std::from_chars(text.data(), end, value);
    require(
        error == std::errc() && stop == end && value >= minimum && value <= maximum, "the variable ", name,
        " must be a number in ", minimum, " .. ", maximum, ", got '", text.substr(0, 40), "'");
    return value;
}

// A launcher's variables. What `jobParts` name, together, tells its launches apart.
struct Launcher {
    char const* name;
    char const* rank;
    char const* size;
    char const* localRank;
    std::vector<char const*> jobParts;
};

std::vector<Launcher> const& launchers() {
    static std::vector<Launcher> const known{
        {"TRTLLM_MHC_*", "TRTLLM_MHC_RANK", "TRTLLM_MHC_WORLD_SIZE", "TRTLLM_MHC_LOCAL_RANK", {"TRTLLM_MHC_JOB"}},
        {"torchrun",
         "RANK",
         "WORLD_SIZE",
         "LOCAL_RANK",
         {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"}},
        {"Open MPI",
         "OMPI_COMM_WORLD_RANK",
         "OMPI_COMM_WORLD_SIZE",
         "OMPI_COMM_WORLD_LOCAL_RANK",
         {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"}},
        {"Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", {"SLURM_JOB_ID", "SLURM_STEP_ID"}},
        {"MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", {"PMI_JOBID"}},
    };
    return known;
}

LaunchedProcess requireLaunchedProcess(Variables const& variables) {
    std::optional<LaunchedProcess> const found = readLaunchedProcess(variables);
    if (!found) {
        fail(
            MHC_NOT_BOUND,
            "no variables of a launcher say which rank this process is: run it under torchrun or mpirun, or "
            "set TRTLLM_MHC_RANK, TRTLLM_MHC_WORLD_SIZE and TRTLLM_MHC_RENDEZVOUS (docs/ranks.md)");
    }
    return *found;
}

std::string secretOf(Variables const& variables) {
    std::string const file = valueOf(variables, "TRTLLM_MHC_SECRET_FILE");
    return file.empty() ? valueOf(variables, "TRTLLM_MHC_SECRET") : readSecretFile(file);
}

// Where the processes of a launch meet when nothing is said about it.
std::string rendezvousOf(LaunchedProcess const& process, Variables const& variables) {
    std::string const given = valueOf(variables, "TRTLLM_MHC_RENDEZVOUS");
    if (!given.empty())
        return given;
    require(
        !process.job.empty(), "the variables of ", process.launcher,
        " do not tell this job from others: set TRTLLM_MHC_RENDEZVOUS to a folder of your own, or to tcp://HOST:PORT");
    return join("/tmp/trtllm_mhc-", geteuid());
}

int32_t onErrorOf(Variables const& variables) {
    std::string const text = valueOf(variables, "TRTLLM_MHC_ON_ERROR");
    require(
        text.empty() || text == "trap" || text == "raise",
        "the variable TRTLLM_MHC_ON_ERROR must be trap or raise, got '", text.substr(0, 40), "'");
    return text == "raise" ? MHC_ON_ERROR_RAISE : MHC_ON_ERROR_TRAP;
}

void chooseDevice(mhcCommConfig& config, int32_t localRank, Variables const& variables) {
    if (config.device >= 0)
        return;
    int devices = 0;
    checkCuda(cudaGetDeviceCount(&devices), "a communicator needs a CUDA device: cudaGetDeviceCount");
    if (auto const device = numberOf(variables, "TRTLLM_MHC_DEVICE", 0, devices - 1)) {
        config.device = *device;
        return;
    }
    require(
        localRank >= 0, "which device this rank uses is not said: set TRTLLM_MHC_DEVICE, or the launcher's local rank");
    // A launcher may give each process a device of its own, which then has the number 0 everywhere.
    config.device = localRank % devices;
}

void chooseRank(mhcCommConfig& config, int32_t index, std::string const& what) {
    require(
        config.rank < 0 || config.rank == index, "rank ", config.rank, " of the group is asked for, but ", what,
        " is its rank ", index);
    config.rank = index;
}

int32_t indexIn(std::vector<int32_t> const& group, int32_t worldRank, std::string const& what) {
    auto const found = std::find(group.begin(), group.end(), worldRank);
    require(found != group.end(), what, " is not in the tensor-parallel group ", listOf(group));
    return static_cast<int32_t>(found - group.begin());
}

}  // namespace

std::optional<LaunchedProcess> readLaunchedProcess(Variables const& variables) {
    for (Launcher const& launcher : launchers()) {
        auto const rank = numberOf(variables, launcher.rank, 0, kMaxWorld - 1);
        auto const size = numberOf(variables, launcher.size, 1, kMaxWorld);
        if (!rank && !size)
            continue;
        require(
            rank && size, "the variable ", rank ? launcher.rank : launcher.size, " is set, but not ",
            rank ? launcher.size : launcher.rank);
        require(*rank < *size, launcher.rank, " is ", *rank, ", expected less than ", launcher.size, " = ", *size);
        LaunchedProcess process;
        process.launcher = launcher.name;
        process.rank = *rank;
        process.size = *size;
        process.localRank = numberOf(variables, launcher.localRank, 0, kMaxWorld - 1).value_or(-1);
        for (char const* part : launcher.jobParts) {
            std::string const value = valueOf(variables, part);
            if (!value.empty())
                process.job += std::string(part) + "=" + value + "\n";
        }
        return process;
    }
    return std::nullopt;
}

EnvironmentGroup readEnvironmentGroup(mhcCommConfig const* given, Variables const& variables) {
    mhcCommConfig config = copyConfig(given);
    if (config.capacity == 0)
        config.capacity = numberOf(variables, "TRTLLM_MHC_CAPACITY", 1, 1 << 20).value_or(kDefaultCapacity);
    if (config.timeout_ms == 0)
        config.timeout_ms =
            static_cast<uint32_t>(numberOf(variables, "TRTLLM_MHC_TIMEOUT_MS", 1, 86400000).value_or(0));
    if (config.nccl_rows == 0)
        config.nccl_rows = numberOf(variables, "TRTLLM_MHC_NCCL_ROWS", -1, INT32_MAX).value_or(0);
    if (config.on_error == -1)
        config.on_error = onErrorOf(variables);
    std::vector<int32_t> const group = groupRanks(config.tp_size, config.group, config.group_size);

    if (valueOf(variables, "TRTLLM_MHC_RENDEZVOUS") == kInProcess) {
        // Nothing tells threads apart but the device they work on, or what their engine was built for.
        if (config.rank < 0) {
            require(config.device >= 0, "ranks that are threads need a device each, or engines built for a rank");
            chooseRank(config, indexIn(group, config.device, join("device ", config.device)), "the device");
        }
        CommSettings const settings = readConfig(&config);
        std::string const name = join("environment ", listOf(group), " ", settings.hiddenSize);
        return {settings, [settings, name] {
                    return makeThreadBootstrap(name, settings.rank, settings.tpSize, settings.timeout);
                }};
    }

    LaunchedProcess const process = requireLaunchedProcess(variables);
    std::string const what =
        join("this process, world rank ", process.rank, " of ", process.size, " (", process.launcher, "),");
    int32_t const last = *std::max_element(group.begin(), group.end());
    require(
        last < process.size, "the tensor-parallel group ", listOf(group), " needs ", last + 1, " processes, ",
        process.launcher, " started ", process.size);
    chooseRank(config, indexIn(group, process.rank, what), what);
    chooseDevice(config, process.localRank, variables);
    CommSettings const settings = readConfig(&config);
    GroupIdentity identity;
    identity.secret = secretOf(variables);
    identity.name = join(process.job, listOf(group), " ", settings.hiddenSize);
    identity.ranks = settings.tpSize;
    Digest const digest = Sha256().add(identity.name.data(), identity.name.size()).finish();
    // Groups of one launch differ in their first rank, and so in their port.
    Place const place(
        rendezvousOf(process, variables), "mhc-" + hexadecimal(digest.data(), 16) + ".socket", group.front());
    return {settings, [settings, identity, place] {
                return makeRendezvous(place, identity, settings.rank, settings.timeout);
            }};
}

void requireEnvironmentGroup(Variables const& variables) {
    if (valueOf(variables, "TRTLLM_MHC_RENDEZVOUS") != kInProcess)
        requireLaunchedProcess(variables);
}

char const* environmentVariable(char const* name) {
    return std::getenv(name);
}

}  // namespace mhc
