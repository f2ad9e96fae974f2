#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
#   check_host.sh threads               the host side's tests under ThreadSanitizer
#   check_host.sh fuzz [SECONDS]        libFuzzer on serialised plugin fields and on what ranks tell each other, SECONDS each (15)
#
# The host side is compiled with clang and a CUDA that is not there (cpp/tests/host/fake_cuda.cpp). Include folders are
# those of the build in build/dev (BUILD=...). A crashing input stays in build/fuzz.
set -euo pipefail
cd "$(dirname "$0")/.."
what=${1:?usage: check_host.sh threads|fuzz [SECONDS]}
seconds=${2:-15}
ninja=${BUILD:-build/dev}/build.ninja

if ! command -v clang++ >/dev/null; then
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        echo "check_host.sh: clang++ is not installed, and only root on Debian or Ubuntu gets it here: apt-get install clang" >&2
        exit 1
    fi
    echo "Installing clang"
    { apt-get update -qq && apt-get install -y -qq clang; } >/dev/null
fi
[ -f "$ninja" ] || { echo "check_host.sh: expected a build in $(dirname "$ninja"): make build" >&2; exit 1; }
mapfile -t includes < <(grep -oE -- '-isystem [^ ]+' "$ninja" | sort -u | tr ' ' '\n')

flags=(-std=c++17 -O1 -g -Wall -Wextra -Werror -fno-omit-frame-pointer -Icpp/include -Icpp/src -Icpp/tests/host -Iplugins "${includes[@]}"
    -DMHC_VERSION='"host"')
host=(cpp/src/*.cpp cpp/tests/host/fake_cuda.cpp)
# The plugins but for their registration in TensorRT.
plugins=(plugins/creators.cpp plugins/*/*_plugin.cpp plugins/common/{communication,copies,errors,fields,plugin_base,tensorrt_process,tensors}.cpp)

# build FOLDER SANITIZERS SOURCE...   compiles what is newer than its object
build() {
    local folder=$1 sanitizers=$2 source object
    shift 2
    mkdir -p "$folder"
    for source; do
        object=$folder/${source//\//_}.o
        if [ ! -f "$object" ] || [ -n "$(find "$source" cpp/include cpp/src plugins -newer "$object" -name '*.[ch]*' -print -quit)" ]; then
            echo clang++ "${flags[@]@Q}" "-fsanitize=$sanitizers" -c "$source" -o "$object"
        fi
    done | xargs -d '\n' -r -P "${JOBS:-2}" -I{} bash -c '{}'
}

objects() {
    local folder=$1 source
    shift
    for source; do
        echo "$folder/${source//\//_}.o"
    done
}

case $what in
threads)
    tests=(cpp/tests/{bootstrap,peer_memory,rendezvous}_test.cpp cpp/tests/host/*_host_test.cpp)
    # An NCCL to be found by dlopen, and one that is too old.
    mkdir -p build/tsan
    fake=(clang++ "${flags[@]}" -fsanitize=thread -fPIC -shared cpp/tests/host/fake_nccl.cpp)
    "${fake[@]}" -o build/tsan/libfake_nccl.so
    "${fake[@]}" -DFAKE_NCCL_VERSION=21003 -o build/tsan/libfake_nccl_old.so
    export TRTLLM_MHC_NCCL=$PWD/build/tsan/libfake_nccl.so
    build build/tsan thread "${host[@]}" "${plugins[@]}" "${tests[@]}"
    mapfile -t parts < <(objects build/tsan "${host[@]}" "${plugins[@]}" "${tests[@]}")
    clang++ -fsanitize=thread "${parts[@]}" -lgtest -lgtest_main -lpthread -ldl -o build/tsan/host_tests
    TSAN_OPTIONS=halt_on_error=1 timeout 300 build/tsan/host_tests --gtest_brief=1
    ;;
fuzz)
    targets=(plugin_fields rendezvous meeting)
    build build/fuzz fuzzer-no-link,address,undefined "${host[@]}" "${plugins[@]}"
    for target in "${targets[@]}"; do
        build build/fuzz fuzzer,address,undefined "cpp/tests/fuzz/${target}_fuzzer.cpp"
        mapfile -t parts < <(objects build/fuzz "${host[@]}" "${plugins[@]}" "cpp/tests/fuzz/${target}_fuzzer.cpp")
        clang++ -fsanitize=fuzzer,address,undefined "${parts[@]}" -lpthread -ldl -o "build/fuzz/$target"
    done
    for target in "${targets[@]}"; do
        mkdir -p "build/fuzz/$target.corpus"
        echo "== $target, $seconds s"
        UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 "build/fuzz/$target" -max_total_time="$seconds" -max_len=2048 \
            -timeout=10 -close_fd_mask=3 -verbosity=0 -print_final_stats=1 -artifact_prefix="build/fuzz/$target-" "build/fuzz/$target.corpus"
    done
    ;;
*)
    echo "check_host.sh: expected threads or fuzz, got $what" >&2
    exit 2
    ;;
esac
