// The threads of a block, and the scheduler that runs them.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "arena.h"
#include "counter.h"
#include "fiber.h"
#include "launch.h"

namespace simt {

// Items with the numbers of their groups, taken oldest first. The list keeps its memory.
template <class T>
struct Fifo {
    std::vector<std::pair<unsigned, T>> items;
    size_t taken = 0;

    void clear() {
        items.clear();
        taken = 0;
    }
    // Takes the oldest item if it must be done when at most `groups` of the groups below `open` may be incomplete.
    bool take(T& item, unsigned open, unsigned groups) {
        if (taken == items.size()) {
            clear();
            return false;
        }
        if (items[taken].first + groups >= open) return false;
        item = items[taken++].second;
        return true;
    }
};

enum class State { ready, at_barrier, in_collective, at_mbarrier, at_named, done };

struct Block;

struct Worker : Thread {
    Block* block;
    Fiber fiber;
    State state;
    Place at;  // where it waits
    Fifo<AsyncCopy> copies;  // that cp.async has started
    unsigned open_group;
    const void* barrier;  // the barrier that it waits for
    unsigned parity;
    Fifo<UnfencedStore> unfenced;  // all in group 0
    std::vector<void*> new_mbarriers;  // initialised and not fenced
    Fifo<Product> products;  // that wgmma has started
    unsigned open_products, products_begun;
    // Sums that pending products add to.
    struct PendingSums {
        float* sums;
        unsigned uses;
        std::vector<float> values;
    };
    std::vector<PendingSums> pending_sums;
    bool fenced;
    bool waits;  // for the launches before: it has not called wait_for_launches
    unsigned uncounted;  // number of models that are running
};

// A pending bulk copy with its own copy of the map; reused when it is done.
struct PendingBulk {
    BulkCopy copy;
    bool done;
    volatile uint64_t map[16];
};

// One of the barriers 1 to 15 of a block.
struct NamedBarrier {
    unsigned threads, arrived, opened;
    Place at;
    char order[2];
};

// The last products that the first thread of a warpgroup has started: the other threads must start the same.
struct Warpgroup {
    struct Begun {
        unsigned number;
        uint64_t a_matrix, b_matrix;
        int line;
    };
    Begun recent[64];
    Place at;
};

// The scheduler of one block at a time.
struct Block {
    const char* kernel;
    const Grid& grid;
    void (*call)(void* const*);
    void* const* args;
    Arena& arena;
    unsigned threads;
    uint64_t random;
    Span storage;
    Fiber main{};
    std::vector<Worker> workers;
    std::vector<Worker*> ready;  // may run, in the next round
    std::vector<Worker*> round;  // run in this round, one after the other
    size_t round_next = 0;       // index of the next thread of the round
    std::vector<Worker*> priority;  // run before the rest of the round: lanes whose collective is complete
    size_t priority_next = 0;       // index of the next thread of `priority`
    bool prioritize_lanes = true;
    unsigned collectives = 0;       // completed since the last thread of the round was started
    Fiber* previous = nullptr;      // the fiber that ran before this one
    Thread** running = &self;       // cached, because finding a thread_local takes a call
    std::vector<Worker*> deferred;  // run when no other thread can
    unsigned yes = 0;               // votes at the current barrier
    Votes votes{};                  // of the last barrier that opened
    unsigned barriers = 0;          // number of barriers that opened
    int fault = 0;
    std::vector<PendingBulk> pending_bulk;
    NamedBarrier named[16];
    std::vector<Warpgroup> warpgroups;
    std::unique_ptr<Counter> counter;  // null: nothing is counted
    // Their addresses identify orderings: of the two barriers that may be in use at once, of the start and of the end.
    char barrier_order[2], start_order, end_order;

    Block(const char* kernel, const Grid& grid, void (*call)(void* const*), void* const* args, Arena& arena);
    ~Block();
    // Prepares the threads of a block.
    void begin(uint64_t index);
    // Runs the threads until all have exited or one has failed.
    void run();
    // Switches from `from`, which never continues if `ends`, to the next thread.
    void run_next(Fiber& from, bool ends);
    // Switches from `worker` to the next thread, or to the scheduler if there is none or a thread has failed.
    void switch_from(Worker& worker, bool ends);
    // Called when no thread can run: opens the barrier, completes bulk copies, or reports why the threads are stuck.
    void resolve_stall();
    // Makes `worker` ready to run.
    void wake(Worker& worker);
    // Makes lanes of a warp ready to run: in this round, while their stacks are still in the cache, or in the next round.
    void wake_lanes(unsigned warp, unsigned lanes);
    // Returns whether a thread is left in this round.
    bool round_continues() const { return priority_next < priority.size() || round_next < round.size(); }
    // Completes the bulk copies of an mbarrier, or all if null; returns whether there were any.
    bool complete_bulk(const void* barrier);
    void open_barrier();
    // Returns the next random number of the launch.
    uint64_t draw();
    template <class T>
    void shuffle(std::vector<T>& list) {
        for (size_t i = list.size(); i > 1; i--) std::swap(list[i - 1], list[(draw() >> 32) * i >> 32]);
    }
};

// Returns the running thread.
inline Worker& current() { return *static_cast<Worker*>(self); }
// Switches to another thread; returns when this thread runs again, which never happens after a fault.
void suspend(Worker& worker);

}  // namespace simt
