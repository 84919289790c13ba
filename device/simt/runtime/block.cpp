#include "block.h"

#include <link.h>

#include <cstdlib>
#include <cstring>

// All thread_local storage of this library is shared memory of kernels, so it takes no list of their variables to fill
// them. What of it belongs to the runtime (`self`, the report, the name in library.cpp) is set anew after a fill.
alignas(1024) thread_local unsigned char smem[SIMT_SHARED_BYTES];

namespace simt {

thread_local Thread* self;

namespace {

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

// The first and last thing that a fiber does.
void enter_thread() {
    Worker& worker = current();
    Block& block = *worker.home;
    entered(*block.left);
    acquire_order(&block.start_order);
    block.call(block.args);
    if (!worker.products.empty()) {
        fail(Fault::bad_async, "this thread leaves the kernel before it has waited for this wgmma", worker.products.back().second.at);
    }
    release_order(&block.end_order);
    worker.state = State::done;
    block.arena.warp(worker.warp).live &= ~(1u << worker.lane);
    block.pass_on(worker, true);
    std::abort();  // nobody switches to a thread that is done
}

bool same(Place a, Place b) { return a.line == b.line && std::strcmp(a.file, b.file) == 0; }

}  // namespace

void leave(Worker& worker) {
    release_order(&worker.home->end_order);
    worker.home->pass_on(worker, false);
}

Block::Block(const char* kernel, const Grid& grid, void (*call)(void* const*), void* const* args, Arena& arena)
    : kernel(kernel), grid(grid), call(call), args(args), arena(arena), threads(grid.block.x * grid.block.y * grid.block.z),
      random(grid.seed), storage(shared_storage()), workers(threads), warpgroups((threads + 4 * WARP - 1) / (4 * WARP)) {
    flying.reserve(1024);
    ready.reserve(threads);
    round.reserve(threads);
    near.reserve(threads);
    late.reserve(threads);
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
    flying.clear();
    near.clear();
    near_turn = 0;
    warp_first = !grid.seed || draw() % 2;
    for (NamedBarrier& barrier : named) barrier = {};
    for (Warpgroup& group : warpgroups) group = {};
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
        worker.unfenced.clear();
        worker.refenced = 0;
        worker.fresh.clear();
        worker.products.clear();
        worker.products_landed = 0;
        worker.open_products = worker.products_begun = 0;
        worker.held.clear();
        worker.fenced = false;
        worker.fiber.stack = arena.stack(i);
        // Frames of one depth would fall into one set of the cache if every stack began at the same place of a page.
        worker.fiber.bytes = Arena::STACK_BYTES - i % WARP * 128;
        worker.fiber.start(enter_thread);
        ready.push_back(&worker);
    }
    for (unsigned i = 0; i < threads; i += WARP) {
        arena.warp(i / WARP).live = threads - i >= WARP ? ~0u : (1u << (threads - i)) - 1;
    }
}

void Block::run() {
    for (;;) {
        while (!ready.empty() || !late.empty()) {
            std::swap(ready.empty() ? late : ready, round);
            if (grid.seed) shuffle(round);
            turn = 0;
            run_next(main, false);
            if (fault) return;
            round.clear();
        }
        bool finished = true;
        for (const Worker& worker : workers) finished = finished && worker.state == State::done;
        if (finished && land(nullptr)) {
            const Worker& last = workers[0];
            fault = say(Fault::bad_async, kernel, &last, last.at, "the block ends while a bulk copy to its shared memory is on its way");
        }
        for (size_t i = 0; finished && !fault && i < workers.size(); i++) {
            const Worker &worker = workers[i], &first = workers[i / (4 * WARP) * (4 * WARP)];
            if (worker.products_begun == first.products_begun) continue;
            fault = say(Fault::divergent_collective, kernel, &worker, warpgroups[worker.warp / 4].at,
                        "of its warpgroup some threads have begun %u wgmmas, this one %u", first.products_begun, worker.products_begun);
        }
        if (finished) return;
        nobody_is_ready();
        if (fault) return;
    }
}

void Block::run_next(Fiber& from, bool ends) {
    Worker* next;
    if (near_turn < near.size()) {
        next = near[near_turn++];
    } else {
        next = round[turn++];
        meetings = 0;
    }
    left = &from;
    *running = next;
    switch_fiber(from, next->fiber, ends);
}

void Block::pass_on(Worker& worker, bool ends) {
    if (!fault && goes_on()) return run_next(worker.fiber, ends);
    left = &worker.fiber;
    switch_fiber(worker.fiber, main, ends);
}

// Either all threads wait at one barrier, which opens, or copies land, at last, or they would wait for ever.
void Block::nobody_is_ready() {
    const Worker* in_vain = nullptr;                    // waits for a phase, or for some others
    const Worker* met = nullptr;                        // waits for its warp
    const Worker *first = nullptr, *elsewhere = nullptr;  // wait, at two places if there are two
    unsigned gone = 0;
    for (const Worker& worker : workers) {
        gone += worker.state == State::done;
        if (worker.state == State::done) continue;
        if (worker.state == State::in_meeting) met = &worker;
        if (!in_vain && (worker.state == State::at_mbarrier || worker.state == State::at_named)) in_vain = &worker;
        if (!first) first = &worker;
        if (!same(worker.at, first->at)) elsewhere = &worker;
    }
    if (!elsewhere && !met && !gone && !in_vain) return open_barrier();
    if (land(nullptr)) return;
    if (in_vain) {
        const char* what = in_vain->state == State::at_named ? "a named barrier" : "a phase of an mbarrier";
        fault = say(Fault::deadlock, kernel, in_vain, in_vain->at, "deadlock: this thread waits here for %s that nobody completes", what);
        return;
    }
    const Worker& blamed = met ? *met : elsewhere ? *elsewhere : *first;
    const Worker& other = &blamed == first && elsewhere ? *elsewhere : *first;
    const uint3 t = other.thread_idx;
    if (met && elsewhere) {
        fault = say(Fault::deadlock, kernel, &blamed, blamed.at,
                    "deadlock: this thread waits here for its warp, thread (%u,%u,%u) waits at %s:%d", t.x, t.y, t.z, other.at.file,
                    other.at.line);
    } else if (met) {
        fault = say(Fault::deadlock, kernel, &blamed, blamed.at,
                    "deadlock: this thread waits here for lanes of its warp, %u threads have left the kernel", gone);
    } else if (elsewhere) {
        fault = say(Fault::divergent_barrier, kernel, &blamed, blamed.at,
                    "divergent barrier: this thread waits here, thread (%u,%u,%u) waits at %s:%d", t.x, t.y, t.z, other.at.file,
                    other.at.line);
    } else {
        fault = say(Fault::barrier_after_exit, kernel, &blamed, blamed.at,
                    "barrier after exit: %u threads wait here, %u have left the kernel", threads - gone, gone);
    }
}

void Block::wake(Worker& worker) {
    worker.state = State::ready;
    ready.push_back(&worker);
}

void Block::wake_lanes(unsigned warp, unsigned lanes) {
    // A warp that waits in a loop for another one must let it run.
    const bool at_once = warp_first && ++meetings < 1024;
    // Nothing is allocated on the stack of a fiber: each thread is at most once among those that are to run.
    if (near_turn == near.size() || near.size() + WARP > near.capacity()) {
        near.erase(near.begin(), near.begin() + static_cast<std::ptrdiff_t>(near_turn));
        near_turn = 0;
    }
    std::vector<Worker*>& to = at_once ? near : ready;
    for (; lanes; lanes &= lanes - 1) {
        Worker& lane = workers[warp * WARP + static_cast<unsigned>(__builtin_ctz(lanes))];
        lane.state = State::ready;
        to.push_back(&lane);
    }
    if (at_once && grid.seed && !near_turn) shuffle(near);
}

void Block::open_barrier() {
    votes = {yes, threads};
    yes = 0;
    barriers++;
    for (Worker& worker : workers) wake(worker);
}

}  // namespace simt
