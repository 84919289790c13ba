// Asynchronous operations: mbarriers, named barriers, bulk copies in flight, and products (wgmma) in flight.
//
// An mbarrier is 8 bytes of shared memory, opaque to a kernel (PTX ISA, "mbarrier: contents of the mbarrier object"):
//
//   bit 63 | 62       | 61    | 40..60                            | 20..39            | 0..19
//   none   | unfenced | phase | bytes that are on their way, +2^20 | arrivals a phase  | arrivals that are missing
//
// Shared memory that nobody has written has bit 63: it is no mbarrier.
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
        if (*word & NONE) fail(Fault::bad_async, "this is no mbarrier: nobody has made it one", at);
    }
    unsigned phase() const { return *word >> PHASE_AT & 1; }
    // What is released before the end of a phase is acquired by those who wait for it.
    char* order(unsigned parity) const { return reinterpret_cast<char*>(const_cast<uint64_t*>(word)) + parity; }

    // Changes what is missing, and ends the phase where nothing is; whether it did.
    bool change(unsigned arrivals, int64_t bytes, Block& block, Place at) {
        const uint64_t was = *word, count = was >> 20 & FIELD;
        const uint64_t missing = was & FIELD;
        const int64_t pending = static_cast<int64_t>(was >> 40 & (2 * FIELD + 1)) - NO_BYTES + bytes;
        if (arrivals > missing) fail(Fault::bad_async, "more arrivals at an mbarrier than its phase has", at);
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

// No access of any thread. Volatile, so that no call comes of it that a sanitizer would see.
void move(const BulkCopy& copy) {
    each_chunk(*reinterpret_cast<const TensorMap*>(copy.map), copy.at, copy.shared, [](uint64_t* to, const uint64_t* from) {
        for (int i = 0; i < 2; i++) static_cast<volatile uint64_t*>(to)[i] = from ? static_cast<const volatile uint64_t*>(from)[i] : 0;
    });
}

}  // namespace

void mbarrier_init(void* barrier, unsigned arrivals, Place at) {
    if (reinterpret_cast<uintptr_t>(barrier) % 8) fail(Fault::misaligned, "an mbarrier is not aligned to 8 bytes", at);
    if (arrivals == 0 || arrivals > FIELD) fail(Fault::bad_async, "an mbarrier takes 1 to 2^20 - 1 arrivals a phase", at);
    *static_cast<volatile uint64_t*>(barrier) =
        UNFENCED | uint64_t{NO_BYTES} << 40 | uint64_t{arrivals} << 20 | arrivals;
    current().fresh.push_back(barrier);
}

void mbarrier_fence() {
    for (void* barrier : current().fresh) *static_cast<volatile uint64_t*>(barrier) &= ~UNFENCED;
    current().fresh.clear();
}

void mbarrier_arrive(void* barrier, unsigned bytes, Place at) {
    Mbarrier mbarrier(barrier, at);
    release_order(mbarrier.order(mbarrier.phase()));
    Worker& worker = current();
    Block& block = *worker.home;
    // Those who waited for the end of the phase go first, as far as they come: what this thread ought to have done before is late.
    if (mbarrier.change(1, bytes, block, at) && (!block.grid.seed || block.draw() % 2)) {
        block.late.push_back(&worker);
        leave(worker);
    }
}

void mbarrier_wait(void* barrier, unsigned parity, Place at) {
    Worker& worker = current();
    Mbarrier mbarrier(barrier, at);
    worker.at = at;
    while (mbarrier.phase() == parity) {
        if (worker.home->land(barrier)) continue;
        worker.barrier = barrier;
        worker.parity = parity;
        worker.state = State::at_mbarrier;
        leave(worker);
    }
    acquire_order(mbarrier.order(parity));
}

void named_barrier(unsigned id, unsigned threads, bool wait, Place at) {
    Worker& worker = current();
    Block& block = *worker.home;
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
        for (Worker& other : block.workers) {
            if (other.state == State::at_named && other.barrier == &barrier) block.wake(other);
        }
    } else if (wait) {
        worker.barrier = &barrier;
        worker.at = at;
        worker.state = State::at_named;
        leave(worker);
    }
    if (wait) acquire_order(order);
}

void bulk_begin(const BulkCopy& copy, Place at) {
    Block& block = *current().home;
    Mbarrier mbarrier(copy.barrier, at);
    if (*mbarrier.word & UNFENCED) {
        fail(Fault::bad_async, "the mbarrier of this copy is not known to it: a fence lacks behind mbarrier_init", at);
    }
    release_order(mbarrier.order(mbarrier.phase()));
    current().at = at;
    // In the place of one that has landed, and word by word: the thread sanitizer would take a call that moves them for a write.
    size_t place = 0;
    while (place < block.flying.size() && !block.flying[place].landed) place++;
    if (place == block.flying.size()) {
        if (place == block.flying.capacity()) fail(Fault::bad_async, "more than 1024 bulk copies are on their way", at);
        block.flying.emplace_back();
    }
    Flying& flying = block.flying[place];
    flying.copy = copy;
    flying.copy.map = const_cast<const uint64_t*>(flying.map);
    for (int i = 0; i < 16; i++) flying.map[i] = copy.map[i];
    flying.landed = false;
    if (block.grid.seed && block.draw() % 2) block.land(copy.barrier);
}

bool bulk_flies_to(const void* shared) {
    const auto& flying = current().home->flying;
    return std::any_of(flying.begin(), flying.end(), [=](const Flying& flying) {
        const auto* at = static_cast<const unsigned char*>(shared);
        const auto* first = static_cast<const unsigned char*>(flying.copy.shared);
        return !flying.landed && at >= first && at < first + flying.copy.bytes;
    });
}

bool Block::land(const void* barrier) {
    bool any = false;
    for (auto& [copy, landed, map] : flying) {
        if (landed || (barrier && copy.barrier != barrier)) continue;
        landed = true;
        move(copy);
        Mbarrier(copy.barrier).change(0, -int64_t{copy.bytes}, *this, {});
        any = true;
    }
    return any;
}

void unfenced_store(const UnfencedStore& store) { current().unfenced.push_back(store); }

bool fenced_store(UnfencedStore& store) {
    Worker& worker = current();
    if (worker.refenced == worker.unfenced.size()) {
        worker.unfenced.clear();
        worker.refenced = 0;
        return false;
    }
    store = worker.unfenced[worker.refenced++];
    return true;
}

void product_fence() { current().fenced = true; }

void product_begin(const Product& product) {
    Worker& worker = current();
    Block& block = *worker.home;
    if (block.threads < (worker.warp / 4 + 1) * 4 * WARP) fail(Fault::bad_async, "wgmma takes a warpgroup: four whole warps", product.at);
    if (!worker.fenced) fail(Fault::bad_async, "a wgmma_fence lacks between the last wait, or the start, and this wgmma", product.at);
    const unsigned number = ++worker.products_begun;
    Warpgroup& group = block.warpgroups[worker.warp / 4];
    group.at = product.at;
    Warpgroup::Begun& begun = group.recent[number % 64];
    if (begun.number != number) {
        begun = {number, product.a_matrix, product.b_matrix, product.at.line};
    } else if (begun.line != product.at.line || begun.a_matrix != product.a_matrix || begun.b_matrix != product.b_matrix) {
        fail(Fault::divergent_collective, "threads of a warpgroup begin different wgmmas", product.at);
    }
    auto held = std::find_if(worker.held.begin(), worker.held.end(), [&](const auto& held) { return held.sums == product.sums; });
    if (held == worker.held.end()) {
        worker.held.push_back({product.sums, 0, std::vector<float>(product.sums, product.sums + product.count)});
        held = worker.held.end() - 1;
        std::fill_n(reinterpret_cast<uint32_t*>(product.sums), product.count, ~0u);
    } else if (held->values.size() != product.count) {
        fail(Fault::bad_async, "a wgmma adds to sums of another shape that are on their way", product.at);
    }
    held->uses++;
    worker.products.emplace_back(worker.open_products, product);
}

void product_commit() { current().open_products++; }

bool product_landed(unsigned groups, Product& product, float*& sums) {
    Worker& worker = current();
    worker.fenced = false;
    if (worker.products_landed == worker.products.size()) {
        worker.products.clear();
        worker.products_landed = 0;
        return false;
    }
    const auto& [group, oldest] = worker.products[worker.products_landed];
    if (group + groups >= worker.open_products) return false;
    product = oldest;
    worker.products_landed++;
    for (auto& held : worker.held) {
        if (held.sums == product.sums) sums = held.values.data();
    }
    return true;
}

void product_end(const Product& product) {
    Worker& worker = current();
    if (!product.a_shared && !std::equal(product.a_begun, product.a_begun + 4, product.a_registers)) {
        fail(Fault::bad_async, "the registers of a changed before the wait for this wgmma", product.at);
    }
    const auto held = std::find_if(worker.held.begin(), worker.held.end(), [&](const auto& held) { return held.sums == product.sums; });
    if (--held->uses) return;
    const uint32_t* bits = reinterpret_cast<const uint32_t*>(product.sums);
    if (std::any_of(bits, bits + product.count, [](uint32_t word) { return word != ~0u; })) {
        fail(Fault::bad_async, "the sums of this wgmma were written before the wait for it", product.at);
    }
    std::copy(held->values.begin(), held->values.end(), product.sums);
    worker.held.erase(held);
}

}  // namespace simt
