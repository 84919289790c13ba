// Asynchronous operations: mbarriers, named barriers, pending bulk copies, and pending products (wgmma).
//
// An mbarrier is 8 bytes of shared memory, opaque to a kernel (PTX ISA, "mbarrier: contents of the mbarrier object"):
//
//   bit 63 | 62       | 61    | 40..60                | 20..39             | 0..19
//   none   | unfenced | phase | pending bytes + 2^20  | arrivals per phase | missing arrivals
//
// Shared memory that was not written has bit 63 set: it is not an mbarrier.
#include <algorithm>

#include "../include/simt/host/shared_matrix.h"
#include "block.h"

namespace simt {

namespace {

constexpr uint64_t FIELD = (1 << 20) - 1, NONE = uint64_t{1} << 63, UNFENCED = uint64_t{1} << 62;
constexpr int PHASE_AT = 61;
constexpr int64_t NO_BYTES = 1 << 20;

struct Mbarrier {
    volatile uint64_t* word;

    explicit Mbarrier(void* barrier) : word(static_cast<volatile uint64_t*>(barrier)) {}
    Mbarrier(void* barrier, Place at) : Mbarrier(barrier) {
        if (reinterpret_cast<uintptr_t>(barrier) % 8) fail(Fault::misaligned, "an mbarrier is not aligned to 8 bytes", at);
        if (*word & NONE) fail(Fault::bad_async, "this memory is not initialised as an mbarrier", at);
    }
    unsigned phase() const { return *word >> PHASE_AT & 1; }
    // Identifies the ordering by a phase: released before its end, acquired by threads that wait for it.
    char* order(unsigned parity) const { return reinterpret_cast<char*>(const_cast<uint64_t*>(word)) + parity; }

    // Subtracts arrivals and adds bytes; completes the phase if nothing is missing, and returns whether it did.
    bool change(unsigned arrivals, int64_t bytes, Block& block, Place at) {
        const uint64_t was = *word, count = was >> 20 & FIELD;
        const uint64_t missing = was & FIELD;
        const int64_t pending = static_cast<int64_t>(was >> 40 & (2 * FIELD + 1)) - NO_BYTES + bytes;
        if (arrivals > missing) fail(Fault::bad_async, "more arrivals at an mbarrier than its phase takes", at);
        if (pending > int64_t{FIELD} || pending < -int64_t{FIELD}) {
            fail(Fault::bad_async, "an mbarrier counts at most 2^20 - 1 bytes", at);
        }
        const bool ends = missing == arrivals && pending == 0;
        const uint64_t phase = phase_bit(was) ^ uint64_t{ends};
        *word = (was & UNFENCED) | phase << PHASE_AT | static_cast<uint64_t>(pending + NO_BYTES) << 40 | count << 20 |
                (ends ? count : missing - arrivals);
        if (!ends) return false;
        for (Worker& worker : block.workers) {
            if (worker.state == State::at_mbarrier && worker.barrier == word && worker.parity != phase) block.wake(worker);
        }
        return true;
    }
    static uint64_t phase_bit(uint64_t word) { return word >> PHASE_AT & 1; }
};

// Returns the pending sums that the product adds to, or the end of the list.
auto find_sums(Worker& worker, const Product& product) {
    return std::find_if(worker.pending_sums.begin(), worker.pending_sums.end(),
                        [&](const Worker::PendingSums& pending) { return pending.sums == product.sums; });
}

// Copies the box. This is not an access by a thread: volatile, so that the compiler makes no call that a sanitizer would see.
void copy_box(const BulkCopy& copy) {
    each_chunk(*reinterpret_cast<const TensorMap*>(copy.map), copy.at, copy.shared, [](uint64_t* to, const uint64_t* from) {
        for (int i = 0; i < 2; i++) {
            static_cast<volatile uint64_t*>(to)[i] = from ? static_cast<const volatile uint64_t*>(from)[i] : 0;
        }
    });
}

void count_box(const BulkCopy& copy, Counter& counter) {
    const TensorMap& map = *reinterpret_cast<const TensorMap*>(copy.map);
    const uint64_t* row = nullptr;
    unsigned bytes = 0;
    each_chunk(map, copy.at, copy.shared, [&](uint64_t*, const uint64_t* from) {
        if (!from || from != row + bytes / 8 || bytes == map.row_bytes()) {
            counter.box_row(row, bytes);
            row = from;
            bytes = 0;
        }
        if (from) bytes += 16;
    });
    counter.box_row(row, bytes);
}

}  // namespace

void mbarrier_init(void* barrier, unsigned arrivals, Place at) {
    if (reinterpret_cast<uintptr_t>(barrier) % 8) fail(Fault::misaligned, "an mbarrier is not aligned to 8 bytes", at);
    if (arrivals == 0 || arrivals > FIELD) fail(Fault::bad_async, "an mbarrier takes 1 to 2^20 - 1 arrivals per phase", at);
    *static_cast<volatile uint64_t*>(barrier) =
        UNFENCED | uint64_t{NO_BYTES} << 40 | uint64_t{arrivals} << 20 | arrivals;
    current().new_mbarriers.push_back(barrier);
}

void mbarrier_fence() {
    for (void* barrier : current().new_mbarriers) *static_cast<volatile uint64_t*>(barrier) &= ~UNFENCED;
    current().new_mbarriers.clear();
}

void mbarrier_arrive(void* barrier, unsigned bytes, Place at) {
    Mbarrier mbarrier(barrier, at);
    release_order(mbarrier.order(mbarrier.phase()));
    Worker& worker = current();
    Block& block = *worker.block;
    // Threads that waited for the phase run first, as far as they can, so that anything this thread should have done earlier
    // shows.
    if (mbarrier.change(1, bytes, block, at) && (!block.grid.seed || block.draw() % 2)) {
        block.deferred.push_back(&worker);
        suspend(worker);
    }
}

void mbarrier_wait(void* barrier, unsigned parity, Place at) {
    Worker& worker = current();
    Mbarrier mbarrier(barrier, at);
    worker.at = at;
    while (mbarrier.phase() == parity) {
        if (worker.block->complete_bulk(barrier)) continue;
        worker.barrier = barrier;
        worker.parity = parity;
        worker.state = State::at_mbarrier;
        suspend(worker);
    }
    acquire_order(mbarrier.order(parity));
}

void named_barrier(unsigned id, unsigned threads, bool wait, Place at) {
    Worker& worker = current();
    Block& block = *worker.block;
    if (id < 1 || id > 15 || threads == 0 || threads % WARP) {
        fail(Fault::bad_async, "named barriers are 1 to 15, for a multiple of 32 threads", at);
    }
    NamedBarrier& barrier = block.named[id];
    if (barrier.arrived == 0) {
        barrier.threads = threads;
        barrier.at = at;
    } else if (barrier.threads != threads) {
        fail(Fault::bad_async, "threads meet at a named barrier with different counts", at);
    }
    char* order = &barrier.order[barrier.opened % 2];
    release_order(order);
    if (++barrier.arrived == threads) {
        barrier.arrived = 0;
        barrier.opened++;
        if (block.counter) block.counter->open_named_barrier();
        for (Worker& other : block.workers) {
            if (other.state == State::at_named && other.barrier == &barrier) block.wake(other);
        }
    } else if (wait) {
        worker.barrier = &barrier;
        worker.at = at;
        worker.state = State::at_named;
        suspend(worker);
    }
    if (wait) acquire_order(order);
}

void bulk_begin(const BulkCopy& copy, Place at) {
    Block& block = *current().block;
    if (current().waits) fail(Fault::too_early, "this copy reads global memory before wait_for_launches", at);
    Mbarrier mbarrier(copy.barrier, at);
    if (*mbarrier.word & UNFENCED) {
        fail(Fault::bad_async, "the mbarrier of this copy is not visible to it: a fence after mbarrier_init is missing", at);
    }
    release_order(mbarrier.order(mbarrier.phase()));
    current().at = at;
    // Reuses the entry of a finished copy, and copies word by word: the thread sanitizer would treat a call that copies as a
    // write.
    size_t place = 0;
    while (place < block.pending_bulk.size() && !block.pending_bulk[place].done) place++;
    if (place == block.pending_bulk.size()) {
        if (place == block.pending_bulk.capacity()) fail(Fault::bad_async, "more than 1024 bulk copies are pending", at);
        block.pending_bulk.emplace_back();
    }
    PendingBulk& pending_bulk = block.pending_bulk[place];
    pending_bulk.copy = copy;
    pending_bulk.copy.map = const_cast<const uint64_t*>(pending_bulk.map);
    for (int i = 0; i < 16; i++) pending_bulk.map[i] = copy.map[i];
    pending_bulk.done = false;
    if (block.grid.seed && block.draw() % 2) block.complete_bulk(copy.barrier);
}

bool bulk_pending_at(const void* shared) {
    const auto& pending = current().block->pending_bulk;
    return std::any_of(pending.begin(), pending.end(), [=](const PendingBulk& bulk) {
        const auto* at = static_cast<const unsigned char*>(shared);
        const auto* first = static_cast<const unsigned char*>(bulk.copy.shared);
        return !bulk.done && at >= first && at < first + bulk.copy.bytes;
    });
}

bool Block::complete_bulk(const void* barrier) {
    bool any = false;
    for (auto& [copy, done, map] : pending_bulk) {
        if (done || (barrier && copy.barrier != barrier)) continue;
        done = true;
        copy_box(copy);
        if (counter) count_box(copy, *counter);
        Mbarrier(copy.barrier).change(0, -int64_t{copy.bytes}, *this, {});
        any = true;
    }
    return any;
}

void unfenced_store(const UnfencedStore& store) { current().unfenced.items.emplace_back(0, store); }

bool next_unfenced_store(UnfencedStore& store) { return current().unfenced.take(store, 1, 0); }

void product_fence() { current().fenced = true; }

void product_begin(const Product& product) {
    Worker& worker = current();
    Block& block = *worker.block;
    if (block.threads < (worker.warp / 4 + 1) * 4 * WARP) fail(Fault::bad_async, "wgmma takes a warpgroup: four whole warps", product.at);
    if (!worker.fenced) fail(Fault::bad_async, "a wgmma_fence is missing between the last wait, or the start, and this wgmma", product.at);
    const unsigned number = ++worker.products_begun;
    if (worker.linear % (4 * WARP) == 0) count_product(true, 64 * product.count * 2 * 16);
    Warpgroup& group = block.warpgroups[worker.warp / 4];
    group.at = product.at;
    Warpgroup::Begun& begun = group.recent[number % 64];
    if (begun.number != number) {
        begun = {number, product.a_matrix, product.b_matrix, product.at.line};
    } else if (begun.line != product.at.line || begun.a_matrix != product.a_matrix || begun.b_matrix != product.b_matrix) {
        fail(Fault::divergent_collective, "threads of a warpgroup start different wgmmas", product.at);
    }
    auto pending_sums = find_sums(worker, product);
    if (pending_sums == worker.pending_sums.end()) {
        worker.pending_sums.push_back({product.sums, 0, std::vector<float>(product.sums, product.sums + product.count)});
        pending_sums = worker.pending_sums.end() - 1;
        std::fill_n(reinterpret_cast<uint32_t*>(product.sums), product.count, ~0u);
    } else if (pending_sums->values.size() != product.count) {
        fail(Fault::bad_async, "a wgmma adds to pending sums of another shape", product.at);
    }
    pending_sums->uses++;
    worker.products.items.emplace_back(worker.open_products, product);
}

void product_commit() { current().open_products++; }

bool next_due_product(unsigned groups, Product& product, float*& sums) {
    Worker& worker = current();
    worker.fenced = false;
    if (!worker.products.take(product, worker.open_products, groups)) return false;
    sums = find_sums(worker, product)->values.data();
    return true;
}

void finish_product(const Product& product) {
    Worker& worker = current();
    if (!product.a_shared && !std::equal(product.a_begun, product.a_begun + 4, product.a_registers)) {
        fail(Fault::bad_async, "the registers of a changed before the wait for this wgmma", product.at);
    }
    const auto pending_sums = find_sums(worker, product);
    if (--pending_sums->uses) return;
    const uint32_t* bits = reinterpret_cast<const uint32_t*>(product.sums);
    if (std::any_of(bits, bits + product.count, [](uint32_t word) { return word != ~0u; })) {
        fail(Fault::bad_async, "the sums of this wgmma were written before the wait for it", product.at);
    }
    std::copy(pending_sums->values.begin(), pending_sums->values.end(), product.sums);
    worker.pending_sums.erase(pending_sums);
}

}  // namespace simt
