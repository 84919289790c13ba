#include "block.h"

#include <link.h>

#include <cstdlib>
#include <cstring>

// All thread_local storage of this library is shared memory of kernels, so the runtime can fill it without a list of variables.
// The variables of the runtime itself (`self`, the report, the name in library.cpp) are set again after a fill.
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

// The outermost function of a fiber.
void thread_main() {
    Worker& worker = current();
    Block& block = *worker.block;
    after_first_switch(*block.previous);
    acquire_order(&block.start_order);
    block.call(block.args);
    if (worker.waits) fail(Fault::too_early, "this thread exits without wait_for_launches", {block.grid.source, 0});
    if (!worker.products.items.empty()) {
        fail(Fault::bad_async, "this thread exits without a wait for this wgmma", worker.products.items.back().second.at);
    }
    release_order(&block.end_order);
    worker.state = State::done;
    block.arena.warp(worker.warp).live &= ~(1u << worker.lane);
    block.switch_from(worker, true);
    std::abort();  // never switched to again
}

bool same(Place a, Place b) { return a.line == b.line && std::strcmp(a.file, b.file) == 0; }

}  // namespace

void wait_for_launches() { current().waits = false; }

void suspend(Worker& worker) {
    release_order(&worker.block->end_order);
    worker.block->switch_from(worker, false);
}

Block::Block(const char* kernel, const Grid& grid, void (*call)(void* const*), void* const* args, Arena& arena)
    : kernel(kernel), grid(grid), call(call), args(args), arena(arena), threads(grid.block.x * grid.block.y * grid.block.z),
      random(grid.seed), storage(shared_storage()), workers(threads), warpgroups((threads + 4 * WARP - 1) / (4 * WARP)) {
    if (grid.counts) {
        // A running thread reads its identity, which is in registers on a device.
        auto* first = reinterpret_cast<unsigned char*>(workers.data());
        const Span identities{first, first + threads * sizeof(Worker)};
        counter = std::make_unique<Counter>(threads, storage, std::vector<Span>{arena.span(), identities});
    }
    pending_bulk.reserve(1024);
    ready.reserve(threads);
    round.reserve(threads);
    priority.reserve(threads);
    deferred.reserve(threads);
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
    // Shared memory that was not written reads as NaN.
    unpoison(smem, sizeof smem);
    std::memset(storage.begin, 0xff, static_cast<size_t>(smem - storage.begin));
    std::memset(smem, 0xff, grid.shared_bytes);
    std::memset(smem + sizeof smem, 0xff, static_cast<size_t>(storage.end - (smem + sizeof smem)));
    poison(smem + grid.shared_bytes, sizeof smem - grid.shared_bytes);
    pending_bulk.clear();
    priority.clear();
    priority_next = 0;
    prioritize_lanes = !grid.seed || draw() % 2;
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
        worker.block = this;
        worker.state = State::ready;
        worker.copies.clear();
        worker.open_group = 0;
        worker.unfenced.clear();
        worker.new_mbarriers.clear();
        worker.products.clear();
        worker.open_products = worker.products_begun = 0;
        worker.pending_sums.clear();
        worker.fenced = false;
        worker.waits = grid.overlapped;
        worker.uncounted = 0;
        worker.fiber.stack = arena.stack(i);
        // If every stack began at the same offset of a page, frames of equal depth would compete for one set of the cache.
        worker.fiber.bytes = Arena::STACK_BYTES - i % WARP * 128;
        worker.fiber.start(thread_main);
        ready.push_back(&worker);
    }
    for (unsigned i = 0; i < threads; i += WARP) {
        arena.warp(i / WARP).live = threads - i >= WARP ? ~0u : (1u << (threads - i)) - 1;
    }
}

void Block::run() {
    for (;;) {
        while (!ready.empty() || !deferred.empty()) {
            std::swap(ready.empty() ? deferred : ready, round);
            if (grid.seed) shuffle(round);
            round_next = 0;
            run_next(main, false);
            if (fault) return;
            round.clear();
        }
        bool finished = true;
        for (const Worker& worker : workers) finished = finished && worker.state == State::done;
        if (finished && complete_bulk(nullptr)) {
            const Worker& last = workers[0];
            fault = report_fault(Fault::bad_async, kernel, &last, last.at,
                                 "the block ends while a bulk copy to its shared memory is pending");
        }
        for (size_t i = 0; finished && !fault && i < workers.size(); i++) {
            const Worker &worker = workers[i], &first = workers[i / (4 * WARP) * (4 * WARP)];
            if (worker.products_begun == first.products_begun) continue;
            fault = report_fault(Fault::divergent_collective, kernel, &worker, warpgroups[worker.warp / 4].at,
                        "this thread has started %u wgmmas, another thread of its warpgroup %u", worker.products_begun, first.products_begun);
        }
        if (finished) return;
        resolve_stall();
        if (fault) return;
    }
}

void Block::run_next(Fiber& from, bool ends) {
    Worker* next;
    if (priority_next < priority.size()) {
        next = priority[priority_next++];
    } else {
        next = round[round_next++];
        collectives = 0;
    }
    previous = &from;
    *running = next;
    switch_fiber(from, next->fiber, ends);
}

void Block::switch_from(Worker& worker, bool ends) {
    if (!fault && round_continues()) return run_next(worker.fiber, ends);
    previous = &worker.fiber;
    switch_fiber(worker.fiber, main, ends);
}

// If all threads wait at one barrier, it opens. Otherwise pending copies are completed. Otherwise the threads are stuck.
void Block::resolve_stall() {
    const Worker* stuck = nullptr;                    // waits at an mbarrier or a named barrier
    const Worker* in_warp = nullptr;                    // waits in a collective of its warp
    const Worker *first = nullptr, *elsewhere = nullptr;  // wait at two different places, if there are two
    unsigned exited = 0;
    for (const Worker& worker : workers) {
        exited += worker.state == State::done;
        if (worker.state == State::done) continue;
        if (worker.state == State::in_collective) in_warp = &worker;
        if (!stuck && (worker.state == State::at_mbarrier || worker.state == State::at_named)) stuck = &worker;
        if (!first) first = &worker;
        if (!same(worker.at, first->at)) elsewhere = &worker;
    }
    if (!elsewhere && !in_warp && !exited && !stuck) return open_barrier();
    if (complete_bulk(nullptr)) return;
    if (stuck) {
        const char* what = stuck->state == State::at_named ? "a named barrier" : "a phase of an mbarrier";
        fault = report_fault(Fault::deadlock, kernel, stuck, stuck->at, "deadlock: this thread waits here for %s that no thread completes", what);
        return;
    }
    const Worker& blamed = in_warp ? *in_warp : elsewhere ? *elsewhere : *first;
    const Worker& other = &blamed == first && elsewhere ? *elsewhere : *first;
    const uint3 t = other.thread_idx;
    if (in_warp && elsewhere) {
        fault = report_fault(Fault::deadlock, kernel, &blamed, blamed.at,
                    "deadlock: this thread waits here for its warp, thread (%u,%u,%u) waits at %s:%d", t.x, t.y, t.z, other.at.file,
                    other.at.line);
    } else if (in_warp) {
        fault = report_fault(Fault::deadlock, kernel, &blamed, blamed.at,
                    "deadlock: this thread waits here for lanes of its warp, %u threads have exited", exited);
    } else if (elsewhere) {
        fault = report_fault(Fault::divergent_barrier, kernel, &blamed, blamed.at,
                    "divergent barrier: this thread waits here, thread (%u,%u,%u) waits at %s:%d", t.x, t.y, t.z, other.at.file,
                    other.at.line);
    } else {
        fault = report_fault(Fault::barrier_after_exit, kernel, &blamed, blamed.at,
                    "barrier after exit: %u threads wait here, %u have exited", threads - exited, exited);
    }
}

void Block::wake(Worker& worker) {
    worker.state = State::ready;
    ready.push_back(&worker);
}

void Block::wake_lanes(unsigned warp, unsigned lanes) {
    // Bounded, so that a warp that waits in a loop for another warp lets it run.
    const bool now = prioritize_lanes && ++collectives < 1024;
    // Never grows the vector inside of a fiber: each thread is in it at most once.
    if (priority_next == priority.size() || priority.size() + WARP > priority.capacity()) {
        priority.erase(priority.begin(), priority.begin() + static_cast<std::ptrdiff_t>(priority_next));
        priority_next = 0;
    }
    std::vector<Worker*>& to = now ? priority : ready;
    for (; lanes; lanes &= lanes - 1) {
        Worker& lane = workers[warp * WARP + static_cast<unsigned>(__builtin_ctz(lanes))];
        lane.state = State::ready;
        to.push_back(&lane);
    }
    if (now && grid.seed && !priority_next) shuffle(priority);
}

void Block::open_barrier() {
    votes = {yes, threads};
    yes = 0;
    barriers++;
    if (counter) counter->open_barrier();
    for (Worker& worker : workers) wake(worker);
}

}  // namespace simt
