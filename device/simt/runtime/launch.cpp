#include "launch.h"

#include <link.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#include "arena.h"
#include "fiber.h"

alignas(1024) thread_local unsigned char smem[SIMT_SHARED_BYTES];

namespace simt {

thread_local Thread* self;

namespace {

// All thread_local storage of this library is shared memory of kernels, so it takes no list of their variables to fill
// them. What of it belongs to the runtime (`self`, this, and the name in library.cpp) is set anew after a fill.
thread_local Report last_report;

enum class State { ready, at_barrier, in_meeting, done };

struct Block;

struct Worker : Thread {
    Block* home;
    Fiber fiber;
    State state;
    Place at;                       // where it waits
    // Copies that cp.async has begun, oldest first, each with the number of its group; those before `landed` are done.
    std::vector<std::pair<unsigned, AsyncCopy>> copies;
    size_t landed;
    unsigned open_group;
};

// The thread_local storage of this library in the calling thread. In a main program, whose storage may be that of a C
// library too, it is `smem` alone.
struct Span {
    unsigned char *begin, *end;
};
Span shared_storage() {
    Span found{smem, smem + sizeof smem};
    dl_iterate_phdr(
        [](dl_phdr_info* library, size_t, void* out) {
            Span& span = *static_cast<Span*>(out);
            auto* begin = static_cast<unsigned char*>(library->dlpi_tls_data);
            for (int i = 0; begin && i < library->dlpi_phnum; i++) {
                const auto& segment = library->dlpi_phdr[i];
                if (segment.p_type != PT_TLS || smem < begin || smem >= begin + segment.p_memsz) continue;
                if (*library->dlpi_name) span = {begin, begin + segment.p_memsz};
                return 1;
            }
            return 0;
        },
        &found);
    return found;
}

uint3 position(uint64_t index, dim3 size) {
    return {unsigned(index % size.x), unsigned(index / size.x % size.y), unsigned(index / size.x / size.y)};
}

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
    std::vector<Worker*> round;  // run now
    unsigned yes = 0;            // votes at the barrier that is gathering
    Votes votes{};               // of the last barrier that opened
    unsigned barriers = 0;       // opened so far
    int fault = 0;
    // Addresses that stand for an order: of the two barriers that may be in use at once, of the start and of the end.
    char barrier_order[2], start_order, end_order;

    Block(const char* kernel, const Grid& grid, void (*call)(void* const*), void* const* args, Arena& arena);
    ~Block();
    void begin(uint64_t index);
    void run();
    void resume(Worker& worker);
    void nobody_is_ready();
    void open_barrier();
    uint64_t draw();
    template <class T>
    void shuffle(std::vector<T>& list) {
        for (size_t i = list.size(); i > 1; i--) std::swap(list[i - 1], list[draw() % i]);
    }
};

Worker& current() { return *static_cast<Worker*>(self); }

// Back to the scheduler. Returns when it is this thread's turn again, which after a fault never comes.
void leave(Worker& worker) {
    release_order(&worker.home->end_order);
    switch_fiber(worker.fiber, worker.home->main, false);
}

void enter_thread() {
    Worker& worker = current();
    Block& block = *worker.home;
    entered(block.main);
    acquire_order(&block.start_order);
    block.call(block.args);
    release_order(&block.end_order);
    worker.state = State::done;
    block.arena.warp(worker.warp).live &= ~(1u << worker.lane);
    switch_fiber(worker.fiber, block.main, true);
    std::abort();  // nobody switches to a thread that is done
}

Block::Block(const char* kernel, const Grid& grid, void (*call)(void* const*), void* const* args, Arena& arena)
    : kernel(kernel), grid(grid), call(call), args(args), arena(arena), threads(grid.block.x * grid.block.y * grid.block.z),
      random(grid.seed), storage(shared_storage()), workers(threads) {
    ready.reserve(threads);
    round.reserve(threads);
    main.adopt_thread();
    for (Worker& worker : workers) worker.fiber.create_thread();
    std::memset(smem, 0xff, sizeof smem);
}

Block::~Block() {
    unpoison(smem, sizeof smem);
    for (Worker& worker : workers) worker.fiber.destroy_thread();
}

// SplitMix64 (Steele, Lea and Flood, 2014).
uint64_t Block::draw() {
    uint64_t z = random += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
}

void Block::begin(uint64_t index) {
    // Shared memory that nobody has written reads as NaN.
    unpoison(smem, sizeof smem);
    std::memset(storage.begin, 0xff, static_cast<size_t>(smem - storage.begin));
    std::memset(smem, 0xff, grid.shared_bytes);
    std::memset(smem + sizeof smem, 0xff, static_cast<size_t>(storage.end - (smem + sizeof smem)));
    poison(smem + grid.shared_bytes, sizeof smem - grid.shared_bytes);
    release_order(&start_order);
    for (unsigned i = 0; i < threads; i++) {
        Worker& worker = workers[i];
        worker.thread_idx = position(i, grid.block);
        worker.block_idx = position(index, grid.grid);
        worker.block_dim = grid.block;
        worker.grid_dim = grid.grid;
        worker.linear = i;
        worker.warp = i / WARP;
        worker.lane = i % WARP;
        worker.home = this;
        worker.state = State::ready;
        worker.copies.clear();
        worker.landed = 0;
        worker.open_group = 0;
        worker.fiber.stack = arena.stack(i);
        worker.fiber.bytes = Arena::STACK_BYTES;
        worker.fiber.start(enter_thread);
        ready.push_back(&worker);
    }
    for (unsigned i = 0; i < threads; i += WARP) {
        arena.warp(i / WARP).live = threads - i >= WARP ? ~0u : (1u << (threads - i)) - 1;
    }
}

void Block::run() {
    for (;;) {
        while (!ready.empty()) {
            std::swap(ready, round);
            if (grid.seed) shuffle(round);
            for (Worker* worker : round) {
                resume(*worker);
                if (fault) return;
            }
            round.clear();
        }
        bool finished = true;
        for (const Worker& worker : workers) finished = finished && worker.state == State::done;
        if (finished) return;
        nobody_is_ready();
        if (fault) return;
    }
}

void Block::resume(Worker& worker) {
    self = &worker;
    switch_fiber(main, worker.fiber, false);
}

bool same(Place a, Place b) { return a.line == b.line && std::strcmp(a.file, b.file) == 0; }

// Either all threads wait at one barrier, which opens, or they would wait for ever.
void Block::nobody_is_ready() {
    const Worker* met = nullptr;                        // waits for its warp
    const Worker *first = nullptr, *elsewhere = nullptr;  // wait, at two places if there are two
    unsigned gone = 0;
    for (const Worker& worker : workers) {
        gone += worker.state == State::done;
        if (worker.state == State::done) continue;
        if (worker.state == State::in_meeting) met = &worker;
        if (!first) first = &worker;
        if (!same(worker.at, first->at)) elsewhere = &worker;
    }
    if (!elsewhere && !met && !gone) return open_barrier();
    const Worker& blamed = met ? *met : elsewhere ? *elsewhere : *first;
    const Worker& other = &blamed == first && elsewhere ? *elsewhere : *first;
    const auto blame = [&](Fault code) {
        last_report.block = blamed.block_idx;
        last_report.thread = blamed.thread_idx;
        last_report.at = blamed.at;
        fault = static_cast<int>(code);
    };
    const uint3 t = other.thread_idx;
    if (met && elsewhere) {
        blame(Fault::deadlock);
        say(fault, kernel, "deadlock: this thread waits here for its warp, thread (%u,%u,%u) waits at %s:%d", t.x, t.y, t.z,
            other.at.file, other.at.line);
    } else if (met) {
        blame(Fault::deadlock);
        say(fault, kernel, "deadlock: this thread waits here for lanes of its warp, %u threads have left the kernel", gone);
    } else if (elsewhere) {
        blame(Fault::divergent_barrier);
        say(fault, kernel, "divergent barrier: this thread waits here, thread (%u,%u,%u) waits at %s:%d", t.x, t.y, t.z,
            other.at.file, other.at.line);
    } else {
        blame(Fault::barrier_after_exit);
        say(fault, kernel, "barrier after exit: %u threads wait here, %u have left the kernel", threads - gone, gone);
    }
}

void Block::open_barrier() {
    votes = {yes, threads};
    yes = 0;
    barriers++;
    for (Worker& worker : workers) {
        worker.state = State::ready;
        ready.push_back(&worker);
    }
}

// Number by number: the sanitizers watch memcpy, and this is no access of the kernel's.
template <class T>
void copy(unsigned char* to, const void* from, unsigned bytes) {
    for (unsigned i = 0; i < bytes / sizeof(T); i++) {
        reinterpret_cast<volatile T*>(to)[i] = static_cast<const volatile T*>(from)[i];
    }
}

}  // namespace

Report& report() { return last_report; }

int say(int code, const char* kernel, const char* why, ...) {
    Report& report = last_report;
    char text[512];
    va_list values;
    va_start(values, why);
    std::vsnprintf(text, sizeof text, why, values);
    va_end(values);
    report.code = code;
    const uint3 b = report.block, t = report.thread;
    if (report.at.file) {
        std::snprintf(report.message, sizeof report.message, "kernel %s, block (%u,%u,%u), thread (%u,%u,%u), %s:%d: %s", kernel,
                      b.x, b.y, b.z, t.x, t.y, t.z, report.at.file, report.at.line, text);
    } else {
        std::snprintf(report.message, sizeof report.message, "kernel %s: %s", kernel, text);
    }
    return code;
}

void fail(Fault code, const char* why, Place at) {
    Worker& worker = current();
    last_report.block = worker.block_idx;
    last_report.thread = worker.thread_idx;
    last_report.at = at;
    worker.home->fault = say(static_cast<int>(code), worker.home->kernel, "%s", why);
    leave(worker);
    std::abort();  // a launch that failed resumes nobody
}

Votes barrier(bool vote, Place at) {
    Worker& worker = current();
    Block& block = *worker.home;
    char* order = &block.barrier_order[block.barriers % 2];
    block.yes += vote;
    release_order(order);
    worker.state = State::at_barrier;
    worker.at = at;
    leave(worker);
    acquire_order(order);
    return block.votes;
}

unsigned live_lanes() { return current().home->arena.warp(self->warp).live; }

Rows meet(unsigned mask, const void* value, unsigned bytes, Meeting meeting, Place at) {
    Worker& worker = current();
    Block& block = *worker.home;
    Warp& warp = block.arena.warp(worker.warp);
    const unsigned me = 1u << worker.lane;
    if (!(mask & me)) fail(Fault::bad_mask, "the mask of this warp operation lacks the lane that calls it", at);
    if (mask & ~warp.live) fail(Fault::bad_mask, "the mask of this warp operation names lanes that have left the kernel or never were", at);

    Slot* slot = nullptr;
    for (unsigned used = warp.used; used && !slot; used &= used - 1) {
        Slot& candidate = warp.slots[__builtin_ctz(used)];
        if (candidate.mask == mask && candidate.arrived != mask) slot = &candidate;
    }
    if (!slot) {
        const int free = __builtin_ctz(~warp.used);
        warp.used |= 1u << free;
        slot = &warp.slots[free];
        slot->mask = mask;
        slot->arrived = slot->left = 0;
        slot->meeting = meeting;
        slot->bytes = bytes;
        slot->at = at;
    } else if (slot->meeting != meeting || slot->bytes != bytes || slot->at.line != at.line) {
        char why[384];
        std::snprintf(why, sizeof why, "divergent warp operation: other lanes of mask %#x wait at %s:%d", mask, slot->at.file,
                      slot->at.line);
        fail(Fault::divergent_collective, why, at);
    }

    unsigned char* row = slot->rows[worker.lane];
    bytes % 4 == 0 ? copy<uint32_t>(row, value, bytes) : copy<unsigned char>(row, value, bytes);
    slot->arrived |= me;
    if (meeting == Meeting::sync) release_order(&slot->order);
    if (slot->arrived != mask) {
        worker.state = State::in_meeting;
        worker.at = at;
        leave(worker);
    } else {
        for (unsigned others = mask & ~me; others; others &= others - 1) {
            Worker& other = block.workers[worker.warp * WARP + static_cast<unsigned>(__builtin_ctz(others))];
            other.state = State::ready;
            block.ready.push_back(&other);
        }
    }
    if (meeting == Meeting::sync) acquire_order(&slot->order);
    // What they brought stays in place until a fiber that enters a later meeting takes the slot.
    slot->left |= me;
    if (slot->left == mask) warp.used &= ~(1u << (slot - warp.slots));
    return slot->rows;
}

void maybe_yield() {
    Worker& worker = current();
    Block& block = *worker.home;
    if (!block.grid.seed || block.draw() % 4 != 0) return;
    block.ready.push_back(&worker);
    leave(worker);
}

void async_begin(const AsyncCopy& copy) { current().copies.emplace_back(current().open_group, copy); }

void async_commit() { current().open_group++; }

bool async_landed(unsigned groups, AsyncCopy& copy) {
    Worker& worker = current();
    if (worker.landed == worker.copies.size()) {
        worker.copies.clear();
        worker.landed = 0;
        return false;
    }
    const auto& [group, oldest] = worker.copies[worker.landed];
    if (group + groups >= worker.open_group) return false;
    copy = oldest;
    worker.landed++;
    return true;
}

int launch(const char* kernel, const Grid& grid, void (*call)(void* const*), void* const* args) {
    last_report = {};
    const dim3 g = grid.grid, b = grid.block;
    const uint64_t threads = uint64_t{b.x} * b.y * b.z;
    if (b.x > 1024 || b.y > 1024 || b.z > 64 || threads == 0 || threads > 1024) {
        return say(static_cast<int>(Fault::bad_launch), kernel, "a block of (%u,%u,%u) threads; 1 to 1024 are possible, at most 64 in z", b.x,
                   b.y, b.z);
    }
    const uint64_t blocks = uint64_t{g.x} * g.y * g.z;
    if (blocks == 0 || g.x > 0x7fffffff || g.y > 65535 || g.z > 65535 || blocks > 0xffffffff) {
        return say(static_cast<int>(Fault::bad_launch), kernel,
                   "a grid of (%u,%u,%u) blocks; at least 1, at most 2147483647 in x and 65535 in y and z are possible", g.x, g.y, g.z);
    }
    if (grid.shared_bytes > SIMT_SHARED_BYTES) {
        return say(static_cast<int>(Fault::bad_launch), kernel, "%u bytes of dynamic shared memory; at most %u are possible",
                   grid.shared_bytes, SIMT_SHARED_BYTES);
    }

    Arena* arena = Arena::take(static_cast<unsigned>(threads));
    int fault;
    {
        Block block(kernel, grid, call, args, *arena);
        std::vector<uint32_t> order(blocks);
        for (uint64_t i = 0; i < blocks; i++) order[i] = static_cast<uint32_t>(i);
        if (grid.seed) block.shuffle(order);
        for (const uint32_t index : order) {
            block.begin(index);
            block.run();
            acquire_order(&block.end_order);
            if (block.fault) break;
        }
        fault = block.fault;
    }
    if (fault) {
        delete arena;
    } else {
        Arena::put_back(arena);
        last_report = {};
    }
    return fault;
}

}  // namespace simt
