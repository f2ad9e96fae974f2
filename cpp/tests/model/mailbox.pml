// SPDX-License-Identifier: Apache-2.0
//
// The mailbox protocol of cpp/include/mhc/mailbox.h, for scripts/check_model.sh. README.md says what is in the model,
// what is left out, and what each configuration proves.

#ifndef RANKS
#define RANKS 2
#endif
#ifndef ROWS
#define ROWS 2
#endif
#ifndef CTAS                  // of a row
#define CTAS 1
#endif
#ifndef GENERATIONS
#define GENERATIONS 3
#endif
#ifndef CALLS                 // before the reset, if there is one; 0: without end
#define CALLS 0
#endif
#ifndef CALLS_AFTER_RESET     // 0: no reset
#define CALLS_AFTER_RESET 0
#endif
#ifndef LATE                  // when a wait may end by time-out: false; timeout (nothing else can happen); true (any time)
#define LATE false
#endif
#define APART 1
#define BY_PEER 2
#define AT_ONCE 3
#ifndef STORES
#define STORES BY_PEER
#endif
#ifndef SECOND_STREAM         // 1: rank 0 makes its last call on a stream of its own, on the same lane
#define SECOND_STREAM 0
#endif
#if CALLS
#define PLANS (CALLS + CALLS_AFTER_RESET)
#define TAGS PLANS
#define SEQUENCE_LIMIT 6
#else
#define PLANS 2               // ranks are at most one call apart
#define TAGS 4
#define SEQUENCE_LIMIT GENERATIONS   // headers of calls n and n + GENERATIONS are alike, which only makes it harder
#endif
#if defined(DEVIATIONS) || defined(DEATH) || SECOND_STREAM || CALLS_AFTER_RESET
#define EXPECTED_ERRORS true  // a lane may stop, before the reset
#else
#define EXPECTED_ERRORS false
#endif
#define DEVIANT (RANKS - 1)   // the rank that does what it must not do

// How a call is made.
#define EXCHANGE 1            // one kernel publishes and consumes
#define SPLIT 2               // two
#define PRODUCED 3            // two, and the consumer does not know the publisher's ticket
#define GATED 4               // as SPLIT, with the kernel between them that waits for all headers
#ifndef MODES
#define MODES :: mode = EXCHANGE :: mode = SPLIT :: mode = PRODUCED :: mode = GATED
#endif

// Kernels of a call.
#define PUBLISH 0
#define GATE 1
#define CONSUME 2

// Errors of a lane.
#define LATE_RANK 1
#define OTHER_HEADER 2
#define TICKET_TAKEN 3
#define NOT_PUBLISHED 4
#define BAD_INDEX 5

// What the deviant rank does in its call `deviantCall`.
#define OTHER_ROWS 1
#define OTHER_OPERATION 2
#define NO_PUBLISH 3
#define INDEX_OUTSIDE 4

typedef Cells {               // 0 = not arrived. Data is the tag of the call it comes from, which only the model knows.
    byte data[ROWS * CTAS];
    byte header[ROWS]
};
typedef Generation { Cells from[RANKS] };
typedef RowState {
    byte next;
    byte ticket;
    byte operation;
    byte rows
};
typedef Rank {
    Generation generation[GENERATIONS];
    RowState row[ROWS];
    byte error;
    byte errorOwner;
    byte begun;               // rows that a call has begun while others are to come
    byte begunOwner;
    bool isReset;
    byte clearing             // CTAs that have let the next kernel in and still clear (EARLY_PUBLISH)
};
typedef Stream {
    byte at;                  // kernel that runs: 3 * call + part
    byte toStart;             // its CTAs that have not begun, as bits
    byte left;                // its CTAs that have not ended
    byte stop;                // `at` after the last
    byte arrived[ROWS];       // CTAs at the row's cluster barrier
    bool failed[ROWS];
    byte seen[RANKS * ROWS]   // tag of each rank's contribution to each row of this call (SECOND_STREAM)
};

Rank rank[RANKS];
Stream stream[RANKS + SECOND_STREAM];
byte planMode[PLANS];
byte planRows[PLANS];
#if !CALLS
byte newest;                  // call that was planned last
#endif
#ifdef DEVIATIONS
byte deviation;
byte deviantCall;
#endif
bool mixedRows;               // a call has had rows from both of rank 0's streams (SECOND_STREAM)
bool dead;                    // the deviant rank's process is gone (DEATH)
byte atBarrier[2];            // ranks that have come to the reset's barriers

#define MODE(call) planMode[(call) % PLANS]
#ifdef DEVIATIONS
#define DEVIATES(r, call, how) (deviation == how && r == DEVIANT && call == deviantCall)
#else
#define DEVIATES(r, call, how) false
#endif
#define ROWS_OF(r, call) (DEVIATES(r, call, OTHER_ROWS) -> 3 - planRows[(call) % PLANS] : planRows[(call) % PLANS])
#define OPERATION_OF(r, call) (DEVIATES(r, call, OTHER_OPERATION) -> 3 : (MODE(call) == PRODUCED -> 2 : 1))
#define TAG_OF(r, call) (1 + (call) + (DEVIATES(r, call, OTHER_ROWS) || DEVIATES(r, call, OTHER_OPERATION) -> 64 : 0))
#define HEADER_OF(sequence, rows, operation) (1 + (sequence) + 6 * ((rows) - 1) + 18 * (operation))

inline stopLane(kind, owner) {
    assert(EXPECTED_ERRORS && !rank[r].isReset);
    if
    :: rank[r].error == 0 -> rank[r].error = kind; rank[r].errorOwner = owner
    :: else
    fi
}

// ---- the stream: one kernel after the other ------------------------------------------------------------------------

inline plan(call) {
    if MODES fi;
    MODE(call) = mode;
    mode = 0;
    if
    :: planRows[(call) % PLANS] = ROWS
#if ROWS > 1
    :: planRows[(call) % PLANS] = 1
#endif
    fi
}

// Kernels that the call does not have are skipped; its last, CONSUME, there always is.
inline startKernel(s, r) {
    do
    :: stream[s].at % 3 == PUBLISH && MODE(stream[s].at / 3) == EXCHANGE -> stream[s].at = stream[s].at + 1
    :: stream[s].at % 3 == PUBLISH && DEVIATES(r, stream[s].at / 3, NO_PUBLISH) -> stream[s].at = stream[s].at + 1
    :: stream[s].at % 3 == GATE && MODE(stream[s].at / 3) != GATED -> stream[s].at = stream[s].at + 1
    :: else -> break
    od;
    stream[s].left = (stream[s].at % 3 == GATE -> 1 : ROWS_OF(r, stream[s].at / 3) * CTAS);
    stream[s].toStart = (1 << stream[s].left) - 1
}

inline nextKernel(s, r) {
    stream[s].at = stream[s].at + 1;
#if CALLS
    if
    :: stream[s].at == stream[s].stop || stream[s].at == 3 * CALLS
    :: else -> startKernel(s, r)
    fi
#else
    if
    :: stream[s].at == 3 * TAGS -> stream[s].at = 0
    :: else
    fi;
    if
    :: stream[s].at % 3 == 0 && newest != stream[s].at / 3 -> newest = stream[s].at / 3; plan(newest)
    :: else
    fi;
    startKernel(s, r)
#endif
}

// ---- a CTA ---------------------------------------------------------------------------------------------------------

// What a CTA is at.
#define FLUSH 1               // publish, gated: until its stores have been performed
#define STORE_HEADER 2        // publish, gated: until those of the row's other CTAs have, too
#define WAIT_HEADERS 3        // gate
#define COLLECT 4
#define REARM 5
#define SYNC 6                // at the cluster barrier
#define LEAVE 7

// Stores that are still to be performed, as bits.
#define DATA(i) (1 << (i))
#define HEADER(i) (1 << (RANKS + (i)))
#define BOTH(i) (DATA(i) | HEADER(i))
#define ALL_DATA (DATA(RANKS) - 1)
#define ALL_HEADERS (ALL_DATA << RANKS)

#define THERE(i) rank[i].generation[sequence % GENERATIONS].from[r]
#define HERE(i) rank[r].generation[sequence % GENERATIONS].from[i]
#define KEPT(i) (exchanges && i == r)
#define PRESENT(i) (KEPT(i) || (HERE(i).data[x] != 0 && HERE(i).header[t] != 0))
#define DIFFERS(i) (!KEPT(i) && HERE(i).header[t] != 0 && HERE(i).header[t] != header)
#if RANKS == 2
#define ALL(of) (of(0) && of(1))
#define ANY(of) (of(0) || of(1))
#else
#define ALL(of) (of(0) && of(1) && of(2))
#define ANY(of) (of(0) || of(1) || of(2))
#endif

// Stores of one CTA are performed in any order, and at the latest when its kernel completes. STORES says how finely that
// is looked at: each on its own, those for one peer at once, or all at once when they are issued.
#define PERFORM(i)                                                                                                     \
    if                                                                                                                 \
    :: (todo & DATA(i)) -> THERE(i).data[x] = tag                                                                      \
    :: else                                                                                                            \
    fi;                                                                                                                \
    if                                                                                                                 \
    :: (todo & HEADER(i)) -> THERE(i).header[t] = header                                                               \
    :: else                                                                                                            \
    fi;                                                                                                                \
    todo = todo & ~BOTH(i)
#if STORES == APART
#define STORES_TO(i)                                                                                                   \
    :: atomic { (todo & DATA(i)) -> THERE(i).data[x] = tag; todo = todo & ~DATA(i) }                                   \
    :: atomic { (todo & HEADER(i)) -> THERE(i).header[t] = header; todo = todo & ~HEADER(i) }
#else
#define STORES_TO(i) :: atomic { (todo & BOTH(i)) -> PERFORM(i) }
#endif

// To itself a rank stores at once.
inline issueStores() {
#if STORES == AT_ONCE
    for (i : 0 .. RANKS - 1) {
        PERFORM(i)
    }
    i = 0
#else
    PERFORM(r)
#endif
}

inline arriveAtBarrier() {
    if
    :: failed -> stream[s].failed[t] = true
    :: else
    fi;
    stream[s].arrived[t] = stream[s].arrived[t] + 1;
    phase = SYNC
}

inline takeTicket() {
    holder = rank[r].row[t].ticket;
    if
    :: holder == 0 -> rank[r].row[t].ticket = owner
    :: else
    fi;
    sequence = rank[r].row[t].next;
    failed = false;
    if
    :: rank[r].error != 0 && !(rank[r].error == BAD_INDEX && rank[r].errorOwner == owner) -> failed = true
    :: else ->
       if
       :: holder != 0 && holder != owner -> stopLane(TICKET_TAKEN, owner); failed = true
       :: else
       fi
    fi;
    holder = 0;
#ifndef COUNTS_NO_ROWS
    if
    :: c == 0 && rank[r].begun != 0 && rank[r].begunOwner != owner -> stopLane(TICKET_TAKEN, owner); failed = true
    :: c == 0 && (rank[r].begun == 0 || rank[r].begunOwner == owner) ->
       rank[r].begun = rank[r].begun + 1;
       rank[r].begunOwner = owner;
       if
       :: rank[r].begun == rows -> rank[r].begun = 0; rank[r].begunOwner = 0
       :: else
       fi
    :: else
    fi;
#endif
    if
    :: DEVIATES(r, call, INDEX_OUTSIDE) && !failed -> stopLane(BAD_INDEX, owner)
    :: else
    fi
}

inline currentCall() {
    sequence = rank[r].row[t].next;
    failed = rank[r].error != 0;
    if
    :: !failed && rank[r].row[t].operation == operation && rank[r].row[t].rows == rows &&
       (MODE(call) == PRODUCED -> rank[r].row[t].ticket != 0 : rank[r].row[t].ticket == owner)
    :: !failed && !(rank[r].row[t].operation == operation && rank[r].row[t].rows == rows &&
       (MODE(call) == PRODUCED -> rank[r].row[t].ticket != 0 : rank[r].row[t].ticket == owner)) ->
       stopLane(NOT_PUBLISHED, owner); failed = true
    :: failed
    fi
}

// The property: what is combined comes from one call.
inline useContributions() {
    for (i : 0 .. RANKS - 1) {
        if
        :: KEPT(i)
        :: else ->
#if SECOND_STREAM
           // Which of rank 0's two calls this one meets is open, but no row may be of both.
           assert(stream[s].seen[i * ROWS + t] == 0 || stream[s].seen[i * ROWS + t] == HERE(i).data[x]);
           stream[s].seen[i * ROWS + t] = HERE(i).data[x];
#if ROWS > 1
           if
           :: stream[s].seen[i * ROWS + 1 - t] != 0 && stream[s].seen[i * ROWS + 1 - t] != HERE(i).data[x] ->
              mixedRows = true
           :: else
           fi
#endif
#else
           assert(HERE(i).data[x] == tag)
#endif
        fi
    }
    i = 0
}

#ifdef CLEARS_WRONG_GENERATION
#define CLEARED(i) rank[r].generation[(sequence + 1) % GENERATIONS].from[i]
#else
#define CLEARED(i) HERE(i)
#endif

inline clearSlots() {
    for (i : 0 .. RANKS - 1) {
        if
        :: KEPT(i)
        :: else -> CLEARED(i).data[x] = 0
        fi
    }
    i = 0
}

inline clearHeaders() {
    for (i : 0 .. RANKS - 1) {
        CLEARED(i).header[t] = 0
    }
    i = 0
}

inline nextSequence() {
    rank[r].row[t].next = (rank[r].row[t].next + 1) % SEQUENCE_LIMIT
}

inline releaseRow() {
    rank[r].row[t].ticket = 0;
    rank[r].row[t].operation = 0;
    rank[r].row[t].rows = 0
}

inline begin() {
    stream[s].toStart = stream[s].toStart & ~(1 << x);
    part = stream[s].at % 3;
    call = stream[s].at / 3;
    rows = ROWS_OF(r, call);
    operation = OPERATION_OF(r, call);
    tag = TAG_OF(r, call);
    owner = 1 + call;
    exchanges = part == CONSUME && MODE(call) == EXCHANGE;
    if
    :: part == GATE -> phase = WAIT_HEADERS
    :: part == PUBLISH ->
       takeTicket();
       if
       :: failed && MODE(call) != GATED -> phase = LEAVE
       :: failed && MODE(call) == GATED -> phase = FLUSH
       :: !failed && MODE(call) == GATED -> todo = ALL_DATA; phase = FLUSH
       :: !failed && MODE(call) != GATED -> todo = ALL_DATA | (c == 0 -> ALL_HEADERS : 0); phase = LEAVE
       fi
    :: part == CONSUME && exchanges ->
       takeTicket();
       if
       :: failed -> arriveAtBarrier()
       :: else -> todo = (ALL_DATA | (c == 0 -> ALL_HEADERS : 0)) & ~BOTH(r); phase = COLLECT
       fi
    :: part == CONSUME && !exchanges ->
       currentCall();
       if
       :: failed -> arriveAtBarrier()
       :: else -> phase = COLLECT
       fi
    fi;
    header = HEADER_OF(sequence, rows, operation);
    issueStores();
    // The gate has waited in the consumer's place.
    assert(EXPECTED_ERRORS || phase != COLLECT || MODE(call) != GATED || ALL(PRESENT))
}

inline leave() {
    if
    :: part == PUBLISH && !failed && c == 0 ->
       rank[r].row[t].operation = operation;
       rank[r].row[t].rows = rows
    :: else
    fi;
    phase = 0;
    part = 0;
    call = 0;
    rows = 0;
    operation = 0;
    owner = 0;
    exchanges = false;
    failed = false;
#ifndef EARLY_PUBLISH
    tag = 0;
    header = 0;
    sequence = 0;
#endif
    stream[s].left = stream[s].left - 1;
    if
    :: stream[s].left == 0 ->
       for (i : 0 .. ROWS - 1) {
           stream[s].arrived[i] = 0;
           stream[s].failed[i] = false
       }
#if SECOND_STREAM
       if
       :: stream[s].at % 3 == CONSUME ->
          for (i : 0 .. RANKS * ROWS - 1) {
              stream[s].seen[i] = 0
          }
       :: else
       fi;
#endif
       i = 0;
       nextKernel(s, r)
    :: else
    fi
}

#define STOPPED_GATE(y) (y < rows && rank[r].row[y].operation != operation)
#define PENDING_AT(y, i) (y < rows && GATE_CELL(y, i) == 0)
#define GATE_CELL(y, i) rank[r].generation[rank[r].row[y].next % GENERATIONS].from[i].header[y]
#define OTHER_AT(y, i) (y < rows && GATE_CELL(y, i) != 0 &&                                                             \
                        GATE_CELL(y, i) != HEADER_OF(rank[r].row[y].next, rows, operation))
#if RANKS == 2
#define ANY_RANK(of, y) (of(y, 0) || of(y, 1))
#else
#define ANY_RANK(of, y) (of(y, 0) || of(y, 1) || of(y, 2))
#endif
#if ROWS == 1
#define GATE_STOPPED STOPPED_GATE(0)
#define GATE_PENDING ANY_RANK(PENDING_AT, 0)
#define GATE_OTHER ANY_RANK(OTHER_AT, 0)
#else
#define GATE_STOPPED (STOPPED_GATE(0) || STOPPED_GATE(1))
#define GATE_PENDING (ANY_RANK(PENDING_AT, 0) || ANY_RANK(PENDING_AT, 1))
#define GATE_OTHER (ANY_RANK(OTHER_AT, 0) || ANY_RANK(OTHER_AT, 1))
#endif

#if CALLS
#define ENDED (stream[s].at == stream[s].stop)
#else
#define ENDED false
#endif
#ifdef DEATH
#define GONE (dead && r == DEVIANT)
#else
#define GONE false
#endif

proctype Cta(byte s; byte r; byte t; byte c) {
    byte x = t * CTAS + c;
    byte i, part, call, rows, operation, tag, owner, header, sequence, todo, phase, holder, mode;
    bool exchanges, failed;
#ifdef EARLY_PUBLISH
    byte clearing, clearingHeaders;   // generation + 1
#endif

    do
    // Completion of the kernel before, which a kernel waits for before it reads or takes anything.
    :: atomic { (stream[s].toStart & (1 << x)) && phase == 0 && !GONE -> begin() }

    STORES_TO(0)
    STORES_TO(1)
#if RANKS > 2
    STORES_TO(2)
#endif

    :: atomic { phase == FLUSH && todo == 0 -> stream[s].arrived[t] = stream[s].arrived[t] + 1; phase = STORE_HEADER }
    :: atomic { phase == STORE_HEADER && stream[s].arrived[t] == CTAS ->
           if
           :: c == 0 && !failed -> todo = ALL_HEADERS; issueStores()
           :: else
           fi;
           phase = LEAVE
       }

    :: atomic { phase == WAIT_HEADERS && (rank[r].error != 0 || GATE_STOPPED || !GATE_PENDING) && !GATE_OTHER ->
           phase = LEAVE
       }
    :: atomic { phase == WAIT_HEADERS && GATE_OTHER ->
           stopLane(OTHER_HEADER, owner);
           phase = LEAVE
       }
    :: atomic { phase == WAIT_HEADERS && rank[r].error == 0 && GATE_PENDING && !rank[r].isReset && LATE ->
           stopLane(LATE_RANK, owner);
           phase = LEAVE
       }

    :: atomic { phase == COLLECT && ANY(DIFFERS) ->
           stopLane(OTHER_HEADER, owner);
           failed = true;
           arriveAtBarrier()
       }
    :: atomic { phase == COLLECT && !ANY(DIFFERS) && ALL(PRESENT) && rank[r].clearing == 0 ->
           useContributions();
#ifdef ADVANCES_BEFORE_ALL_HAVE_READ
           if
           :: c == 0 -> nextSequence()
           :: else
           fi;
#endif
           phase = REARM
       }
    :: atomic { phase == COLLECT && !ALL(PRESENT) && rank[r].error != 0 -> failed = true; arriveAtBarrier() }
    :: atomic { phase == COLLECT && !ALL(PRESENT) && rank[r].error == 0 && !rank[r].isReset && LATE ->
           stopLane(LATE_RANK, owner);
           failed = true;
           arriveAtBarrier()
       }
    :: atomic { phase == REARM ->
#ifndef EARLY_PUBLISH
           clearSlots();
#endif
           arriveAtBarrier()
       }
    :: atomic { phase == SYNC && stream[s].arrived[t] == CTAS ->
#ifdef EARLY_PUBLISH
           if
           :: !failed -> clearing = 1 + sequence % GENERATIONS; rank[r].clearing = rank[r].clearing + 1
           :: else
           fi;
#endif
           if
           :: c == 0 && !stream[s].failed[t] ->
#ifdef EARLY_PUBLISH
              clearingHeaders = clearing;
#else
              clearHeaders();
#endif
#ifndef ADVANCES_BEFORE_ALL_HAVE_READ
              nextSequence();
#endif
              releaseRow()
           :: else
           fi;
           if
           :: todo == 0 -> leave()
           :: else -> phase = LEAVE
           fi
       }
#ifdef EARLY_PUBLISH
    :: atomic { clearing != 0 ->
           for (i : 0 .. RANKS - 1) {
               rank[r].generation[clearing - 1].from[i].data[x] = 0;
               if
               :: clearingHeaders != 0 -> rank[r].generation[clearing - 1].from[i].header[t] = 0
               :: else
               fi
           }
           i = 0;
           clearing = 0;
           clearingHeaders = 0;
           rank[r].clearing = rank[r].clearing - 1
       }
#endif

    // Completion makes all stores visible.
    :: atomic { phase == LEAVE && todo == 0 -> leave() }
    :: ENDED || GONE -> break
    od
}

// ---- the host ------------------------------------------------------------------------------------------------------

#define BARRIER(which)                                                                                                 \
    atBarrier[which] = atBarrier[which] + 1;                                                                           \
    atBarrier[which] == RANKS

#if CALLS_AFTER_RESET
proctype Reset(byte me) {
    byte g, i, t;
    stream[me].at == 3 * CALLS;        // synchronise
#ifndef RESETS_WITHOUT_FIRST_BARRIER
    BARRIER(0);
#endif
    for (g : 0 .. GENERATIONS - 1) {
        atomic {
            for (i : 0 .. RANKS - 1) {
                for (t : 0 .. ROWS * CTAS - 1) {
                    rank[me].generation[g].from[i].data[t] = 0;
                    rank[me].generation[g].from[i].header[t / CTAS] = 0
                }
            }
            i = 0;
            t = 0
        }
    }
    atomic {
        for (t : 0 .. ROWS - 1) {
            rank[me].row[t].next = 0;
            rank[me].row[t].ticket = 0;
            rank[me].begun = 0;
            rank[me].begunOwner = 0;
            rank[me].row[t].operation = 0;
            rank[me].row[t].rows = 0
        }
        t = 0;
        rank[me].error = 0;
        rank[me].errorOwner = 0;
        rank[me].isReset = true
    }
#ifndef RESETS_WITHOUT_SECOND_BARRIER
    BARRIER(1);
#endif
    atomic { startKernel(me, me) }
}
#endif

#ifdef DEATH
proctype Death() {
    dead = true
}
#endif

#ifdef EVERY_RANK_STOPS
proctype Verdict(byte r) {
    atomic { stream[r].at == 3 * CALLS -> assert(rank[r].error != 0) }
}
#endif

#if SECOND_STREAM
proctype Ledger() {
    atomic {
        stream[0].at == stream[0].stop && stream[1].at == stream[1].stop && stream[RANKS].at == stream[RANKS].stop ->
        assert(!mixedRows || rank[0].error != 0)
    }
}
#endif

init {
    byte s, r, t, c, mode;
    atomic {
#if CALLS
        for (s : 0 .. PLANS - 1) {
            plan(s)
        }
#else
        plan(0);
#endif
#ifdef DEVIATIONS
        if DEVIATIONS fi;
        if
        :: deviantCall = 0
        :: CALLS > 2 -> deviantCall = 1
        fi;
        if
        :: deviation == NO_PUBLISH && MODE(deviantCall) == EXCHANGE -> deviation = INDEX_OUTSIDE
        :: else
        fi;
#endif
        for (s : 0 .. RANKS - 1 + SECOND_STREAM) {
#if CALLS
            stream[s].stop = 3 * PLANS;
#if SECOND_STREAM
            if
            :: s == 0 -> stream[s].stop = 3 * (CALLS - 1)
            :: s == RANKS -> stream[s].at = 3 * (CALLS - 1)
            :: else
            fi;
#endif
#endif
            r = (s < RANKS -> s : 0);
            startKernel(s, r);
            for (t : 0 .. ROWS - 1) {
                for (c : 0 .. CTAS - 1) {
                    run Cta(s, r, t, c)
                }
            }
#if CALLS_AFTER_RESET
            run Reset(s);
#endif
#ifdef EVERY_RANK_STOPS
            run Verdict(s);
#endif
        }
#ifdef DEATH
        run Death();
#endif
#if SECOND_STREAM
        run Ledger();
#endif
        skip
    }
}
