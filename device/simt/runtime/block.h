// The threads of a block, and who of them may run.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "arena.h"
#include "fiber.h"
#include "launch.h"

namespace simt {

enum class State { ready, at_barrier, in_meeting, at_mbarrier, at_named, done };

struct Block;

struct Worker : Thread {
    Block* home;
    Fiber fiber;
    State state;
    Place at;  // where it waits
    // Copies that cp.async has begun, oldest first, each with the number of its group; those before `landed` are done.
    std::vector<std::pair<unsigned, AsyncCopy>> copies;
    size_t landed;
    unsigned open_group;
    const void* barrier;  // the mbarrier that it waits for
    unsigned parity;
    std::vector<UnfencedStore> unfenced;  // of them, `refenced` have been fenced
    size_t refenced;
    std::vector<void*> fresh;  // mbarriers that it has made and not fenced
    // Products that wgmma has begun, as the copies above, and the sums that they add to.
    std::vector<std::pair<unsigned, Product>> products;
    size_t products_landed;
    unsigned open_products, products_begun;
    struct Held {
        float* sums;
        unsigned uses;
        std::vector<float> values;
    };
    std::vector<Held> held;
    bool fenced;
};

// A bulk copy on its way, with a map of its own; or the place of one that has landed.
struct Flying {
    BulkCopy copy;
    bool landed;
    volatile uint64_t map[16];
};

// One of the barriers 1 to 15.
struct NamedBarrier {
    unsigned threads, arrived, opened;
    Place at;
    char order[2];
};

// The last products that the first warp to come has begun: the others of its warpgroup must begin the same.
struct Warpgroup {
    struct Begun {
        unsigned number;
        uint64_t a_matrix, b_matrix;
        int line;
    };
    Begun recent[64];
    Place at;
};

// The thread_local storage of this library in the calling thread. In a main program, whose storage may be that of a C
// library too, it is `smem` alone.
struct Span {
    unsigned char *begin, *end;
};

// The threads of one block at a time, and who of them may run.
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
    std::vector<Worker*> round;  // run now, one after the other
    size_t turn = 0;             // of the round, who runs next
    std::vector<Worker*> near;   // run before the rest of the round: lanes whose meeting is complete
    size_t near_turn = 0;        // of them, who runs next
    bool warp_first = true;      // whether there are such
    unsigned meetings = 0;       // complete since the round went on
    Fiber* left = nullptr;       // the fiber that ran before this one
    Thread** running = &self;    // where a thread_local is takes a call to find out
    std::vector<Worker*> late;   // may run, once no other may
    unsigned yes = 0;            // votes at the barrier that is gathering
    Votes votes{};               // of the last barrier that opened
    unsigned barriers = 0;       // opened so far
    int fault = 0;
    std::vector<Flying> flying;  // and places of those that have landed
    NamedBarrier named[16];
    std::vector<Warpgroup> warpgroups;
    // Addresses that stand for an order: of the two barriers that may be in use at once, of the start and of the end.
    char barrier_order[2], start_order, end_order;

    Block(const char* kernel, const Grid& grid, void (*call)(void* const*), void* const* args, Arena& arena);
    ~Block();
    // Makes the threads of a block, ready to run.
    void begin(uint64_t index);
    // Runs them until all have left, or one is at fault.
    void run();
    // Leaves `from`, for good if `ends`, for the next one.
    void run_next(Fiber& from, bool ends);
    // Leaves `worker`, for good if `ends`: for the next one, or for the scheduler if there is none, or a fault.
    void pass_on(Worker& worker, bool ends);
    void nobody_is_ready();
    // Makes `worker` ready to run.
    void wake(Worker& worker);
    // Makes lanes of a warp ready to run: at once, so that their stacks are still in the cache, or in the next round.
    void wake_lanes(unsigned warp, unsigned lanes);
    // Whether somebody is to run in this round.
    bool goes_on() const { return near_turn < near.size() || turn < round.size(); }
    // Lands the bulk copies that report to a barrier, or all; gives whether there were any.
    bool land(const void* barrier);
    void open_barrier();
    // The next random number of the launch.
    uint64_t draw();
    template <class T>
    void shuffle(std::vector<T>& list) {
        for (size_t i = list.size(); i > 1; i--) std::swap(list[i - 1], list[(draw() >> 32) * i >> 32]);
    }
};

// The thread that runs.
inline Worker& current() { return *static_cast<Worker*>(self); }
// Back to the scheduler. Returns when it is this thread's turn again, which after a fault never comes.
void leave(Worker& worker);

}  // namespace simt
