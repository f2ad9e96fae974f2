#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
#   check_model.sh [NAME ...]     checks the model of the mailbox, cpp/tests/model/mailbox.pml, in the named or all
#                                 configurations; JOBS=2 at a time. Needs spin and gcc.
#
# Every configuration is searched exhaustively. Those of correct protocols must hold, those of broken ones must fail.
set -euo pipefail
model=$(cd "$(dirname "$0")/.." && pwd)/cpp/tests/model/mailbox.pml

#   name                            must    how
configurations="
    two_ranks_exchange_produced     hold    -DMODES=EXCHANGE+PRODUCED
    two_ranks_split_gated           hold    -DMODES=SPLIT+GATED -DSTORES=AT_ONCE
    two_ctas_a_row                  hold    -DROWS=1 -DCTAS=2 -DSTORES=APART
    three_ranks_every_mode          hold    -DRANKS=3 -DROWS=1
    three_ranks_two_rows            hold    -DRANKS=3 -DSTORES=AT_ONCE -DMODES=EXCHANGE
    three_ranks_two_ctas            hold    -DRANKS=3 -DROWS=1 -DCTAS=2 -DSTORES=AT_ONCE -DMODES=EXCHANGE
    two_generations                 hold    -DGENERATIONS=2 -DMODES=EXCHANGE+SPLIT
    early_publish                   hold    -DEARLY_PUBLISH -DMODES=EXCHANGE
    early_publish_two_generations   fail    -DEARLY_PUBLISH -DMODES=EXCHANGE -DGENERATIONS=2
    early_advance                   fail    -DADVANCES_BEFORE_ALL_HAVE_READ -DROWS=1 -DCTAS=2 -DMODES=EXCHANGE
    other_generation_cleared        fail    -DCLEARS_WRONG_GENERATION -DMODES=EXCHANGE
    other_call                      hold    -DCALLS=2 -DSTORES=APART -DDEVIATIONS=OTHER_ROWS+OTHER_OPERATION -DEVERY_RANK_STOPS
    other_call_three_ranks          hold    -DCALLS=2 -DRANKS=3 -DSTORES=AT_ONCE -DMODES=EXCHANGE -DDEVIATIONS=OTHER_ROWS+OTHER_OPERATION -DEVERY_RANK_STOPS
    other_operation_two_ctas        hold    -DCALLS=2 -DROWS=1 -DCTAS=2 -DSTORES=APART -DDEVIATIONS=OTHER_OPERATION -DEVERY_RANK_STOPS -DLATE=timeout
    no_publish_or_bad_index         hold    -DCALLS=3 -DSTORES=AT_ONCE -DMODES=EXCHANGE+PRODUCED -DDEVIATIONS=NO_PUBLISH+INDEX_OUTSIDE -DEVERY_RANK_STOPS -DLATE=timeout
    death                           hold    -DCALLS=2 -DDEATH -DLATE=timeout -DSTORES=AT_ONCE
    death_three_ranks               hold    -DCALLS=2 -DDEATH -DLATE=timeout -DRANKS=3 -DROWS=1
    reset                           hold    -DCALLS=1 -DCALLS_AFTER_RESET=2 -DLATE=true -DMODES=EXCHANGE+PRODUCED
    reset_three_ranks               hold    -DCALLS=1 -DCALLS_AFTER_RESET=2 -DLATE=true -DMODES=EXCHANGE -DRANKS=3 -DROWS=1
    reset_without_first_barrier     fail    -DCALLS=1 -DCALLS_AFTER_RESET=2 -DLATE=true -DMODES=EXCHANGE -DRESETS_WITHOUT_FIRST_BARRIER
    reset_without_second_barrier    fail    -DCALLS=1 -DCALLS_AFTER_RESET=2 -DLATE=true -DMODES=EXCHANGE -DRESETS_WITHOUT_SECOND_BARRIER
    two_streams                     hold    -DCALLS=2 -DSECOND_STREAM=1 -DMODES=SPLIT -DLATE=timeout
    two_streams_two_ctas            hold    -DCALLS=2 -DSECOND_STREAM=1 -DMODES=EXCHANGE -DLATE=timeout -DROWS=1 -DCTAS=2
    two_streams_exchange            hold    -DCALLS=2 -DSECOND_STREAM=1 -DMODES=EXCHANGE -DLATE=timeout
    rows_are_not_counted            fail    -DCALLS=2 -DSECOND_STREAM=1 -DMODES=EXCHANGE -DLATE=timeout -DCOUNTS_NO_ROWS
"

if ! command -v spin >/dev/null; then
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        echo "check_model.sh: spin is not installed, and only root on Debian or Ubuntu gets it here: apt-get install spin" >&2
        exit 1
    fi
    echo "Installing spin"
    { apt-get update -qq && apt-get install -y -qq --no-install-recommends spin; } >/dev/null
fi
command -v gcc >/dev/null || { echo "check_model.sh: gcc is not installed: apt-get install gcc" >&2; exit 1; }

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

# check NAME MUST FLAG...   one line of outcome; status 0 if it is the expected one
check() {
    local name=$1 must=$2 outcome trace=() flags=() flag
    shift 2
    for flag; do
        case $flag in
        -DMODES=*) flags+=("$(alternatives MODES mode "${flag#*=}")") ;;
        -DDEVIATIONS=*) flags+=("$(alternatives DEVIATIONS deviation "${flag#*=}")") ;;
        *) flags+=("$flag") ;;
        esac
    done
    mkdir "$folder/$name"
    cd "$folder/$name"
    spin -a "${flags[@]}" "$model" >spin.log || { cat spin.log >&2; return 1; }
    gcc -O1 -w -DSAFETY -DCOLLAPSE -DMEMLIM=2000 -o pan pan.c
    timeout 300 ./pan -n -b -m1500000 >pan.log 2>&1 || true
    local property
    property=$(sed -n 's/^pan:1: \(assertion violated\|invalid end state\).*/\1/p' pan.log)
    if [ -n "$property" ]; then
        outcome=fail
        trace=("($property)")
    elif grep -q "errors: 0" pan.log && ! grep -qE "Search not completed|too small|aborted|MEMLIM|out of memory" pan.log; then
        outcome=hold
        trace=("($(sed -n 's/^ *\([0-9.e+]*\) states, stored.*/\1/p' pan.log) states, $(sed -n 's/^pan: elapsed time //p' pan.log))")
    else
        outcome="not finish"
    fi
    if [ "$outcome" = "$must" ]; then
        printf '  ok    %-32s %ss %s\n' "$name" "$outcome" "${trace[*]}"
        return 0
    fi
    printf '  WRONG %-32s must %s, but does %s %s\n' "$name" "$must" "$outcome" "${trace[*]}"
    if [ "$outcome" = fail ]; then
        spin -k mailbox.pml.trail -t -p -g "${flags[@]}" "$model" | tail -80
    elif [ "$outcome" = "not finish" ]; then
        tail -20 pan.log
    fi
    return 1
}

# alternatives MODES mode A+B   -> -DMODES=::mode=A::mode=B, without spaces because spin hands it to a shell
alternatives() {
    echo "-D$1=::$2=${3//+/::$2=}"
}

known=$(awk 'NF { print $1 }' <<<"$configurations")
for name; do
    grep -qx -- "$name" <<<"$known" || { printf 'check_model.sh: no configuration %s; there are:\n%s\n' "$name" "$known" >&2; exit 2; }
done
running=0
wrong=0
while read -r name must flags; do
    [ -n "$name" ] || continue
    [ $# = 0 ] || [[ " $* " == *" $name "* ]] || continue
    if [ "$running" -ge "${JOBS:-2}" ]; then
        wait -n || wrong=1
        running=$((running - 1))
    fi
    # shellcheck disable=SC2086  # flags are words
    (check "$name" "$must" $flags) &
    running=$((running + 1))
done <<<"$configurations"
while [ "$running" -gt 0 ]; do
    wait -n || wrong=1
    running=$((running - 1))
done
exit "$wrong"
