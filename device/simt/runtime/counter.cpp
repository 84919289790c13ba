#include "counter.h"

#include <link.h>

#include <algorithm>

#include "block.h"

namespace simt {

namespace {

constexpr unsigned BANKS = 32, SECTOR = 32, LINE = 64;

// Returns the memory of this library: its constants are immediates or constant memory of a device.
Span image() {
    Span found{};
    dl_iterate_phdr(
        [](dl_phdr_info* library, size_t, void* out) {
            Span span{};
            for (int i = 0; i < library->dlpi_phnum; i++) {
                const auto& segment = library->dlpi_phdr[i];
                if (segment.p_type != PT_LOAD) continue;
                auto* begin = reinterpret_cast<unsigned char*>(library->dlpi_addr + segment.p_vaddr);
                span.begin = span.begin ? std::min(span.begin, begin) : begin;
                span.end = std::max(span.end, begin + segment.p_memsz);
            }
            if (!span.contains(reinterpret_cast<const void*>(&image))) return 0;
            *static_cast<Span*>(out) = span;
            return 1;
        },
        &found);
    return found;
}

}  // namespace

Counter::Counter(unsigned threads, Span shared, std::vector<Span> private_memory)
    : shared_(shared), private_(std::move(private_memory)), warps_((threads + WARP - 1) / WARP) {
    auto* identity = reinterpret_cast<unsigned char*>(&self);
    private_.push_back({identity, identity + sizeof self});
    private_.push_back(image());
}

bool Counter::is_private(const void* at) const {
    return std::any_of(private_.begin(), private_.end(), [=](const Span& span) { return span.contains(at); });
}

void Counter::access(unsigned warp, unsigned lane, const void* at, unsigned bytes, bool write, const void* site) {
    if (is_private(at)) return;
    // A store and a load of one model have one place.
    const uintptr_t key = reinterpret_cast<uintptr_t>(site) * 2 + write;
    Site& found = warps_[warp].try_emplace(key, bytes, write, shared_.contains(at)).first->second;
    const uint64_t index = found.made[lane]++ - found.ended;
    if (index >= found.requests.size()) found.requests.resize(index + 1);
    Request& request = found.requests[index];
    request.lanes |= 1u << lane;
    request.at[lane] = reinterpret_cast<uintptr_t>(at);
    while (!found.requests.empty() && found.requests.front().lanes == ~0u) {
        end_request(found, found.requests.front());
        found.requests.pop_front();
        found.ended++;
    }
}

void Counter::end_request(const Site& site, const Request& request) {
    if (site.shared) return end_shared(site, request);
    uintptr_t sectors[2 * WARP], starts[WARP];
    unsigned count = 0, lanes = 0;
    for (unsigned lane = 0; lane < WARP; lane++) {
        if (!(request.lanes >> lane & 1)) continue;
        const uintptr_t at = request.at[lane];
        starts[lanes++] = at;
        for (uintptr_t sector = at / SECTOR; sector <= (at + site.bytes - 1) / SECTOR; sector++) sectors[count++] = sector;
        mark(at, site.bytes, site.write);
    }
    std::sort(sectors, sectors + count);
    counts_.sectors += static_cast<uint64_t>(std::unique(sectors, sectors + count) - sectors);
    std::sort(starts, starts + lanes);
    for (unsigned i = 0; i < lanes; i++) {
        counts_.wanted_bytes += i + 1 < lanes ? std::min<uintptr_t>(site.bytes, starts[i + 1] - starts[i]) : site.bytes;
    }
    counts_.requests++;
    (site.write ? counts_.written_bytes : counts_.read_bytes) += uint64_t{lanes} * site.bytes;
    wrote_ = wrote_ || site.write;
}

// A pass takes one word of each bank: of 32 lanes for words, of 16 for 8 bytes, of 8 for 16 bytes.
void Counter::end_shared(const Site& site, const Request& request) {
    const unsigned words = std::max(site.bytes / 4, 1u), together = WARP / words;
    counts_.shared_requests++;
    for (unsigned first = 0; first < WARP; first += together) {
        uintptr_t touched[2 * WARP];
        unsigned count = 0;
        for (unsigned lane = first; lane < first + together; lane++) {
            if (!(request.lanes >> lane & 1)) continue;
            for (unsigned word = 0; word < words; word++) touched[count++] = request.at[lane] / 4 + word;
        }
        std::sort(touched, touched + count);
        count = static_cast<unsigned>(std::unique(touched, touched + count) - touched);
        if (count == 0) continue;
        unsigned of_bank[BANKS] = {}, passes = 1;
        for (unsigned i = 0; i < count; i++) passes = std::max(passes, ++of_bank[touched[i] % BANKS]);
        counts_.shared_passes += passes;
        counts_.bank_conflicts += passes - 1;
    }
}

void Counter::mark(uintptr_t at, unsigned bytes, bool write) {
    for (unsigned left = bytes; left > 0;) {
        const unsigned from = at % LINE, here = std::min(left, LINE - from);
        const uint64_t mask = (here == LINE ? ~uint64_t{0} : (uint64_t{1} << here) - 1) << from;
        Bytes& line = lines_[at / LINE];
        (write ? line.written : line.read) |= mask;
        at += here;
        left -= here;
    }
}

void Counter::box_row(const void* from, unsigned bytes) {
    if (bytes == 0) return;
    const uintptr_t at = reinterpret_cast<uintptr_t>(from);
    counts_.requests++;
    counts_.sectors += (at + bytes - 1) / SECTOR - at / SECTOR + 1;
    counts_.wanted_bytes += bytes;
    counts_.read_bytes += bytes;
    mark(at, bytes, false);
}

void Counter::product(bool warpgroup, unsigned multiply_adds) {
    (warpgroup ? counts_.warpgroup_products : counts_.products)++;
    counts_.multiply_adds += multiply_adds;
}

void Counter::meet(unsigned warp, bool whole, Collective collective) {
    if (whole) end_requests(warp);
    counts_.barriers += collective == Collective::sync;
}

void Counter::open_barrier() {
    for (unsigned warp = 0; warp < warps_.size(); warp++) end_requests(warp);
    counts_.barriers++;
}

void Counter::end_requests(unsigned warp) {
    for (auto& [key, site] : warps_[warp]) {
        for (const Request& request : site.requests) {
            if (request.lanes) end_request(site, request);
        }
        site.requests.clear();
        site.ended = 0;
        std::fill_n(site.made, WARP, 0);
    }
}

void Counter::end_block() {
    for (unsigned warp = 0; warp < warps_.size(); warp++) {
        end_requests(warp);
        warps_[warp].clear();
    }
    counts_.blocks++;
    counts_.busy_blocks += wrote_;
    wrote_ = false;
}

quire_sim_counts Counter::counts() const {
    quire_sim_counts counts = counts_;
    for (const auto& [line, bytes] : lines_) {
        counts.distinct_read_bytes += static_cast<uint64_t>(__builtin_popcountll(bytes.read));
        counts.distinct_written_bytes += static_cast<uint64_t>(__builtin_popcountll(bytes.written));
        for (const uint64_t accessed : {bytes.read, bytes.written}) {
            for (unsigned from = 0; from < LINE; from += SECTOR) {
                counts.distinct_sectors += (accessed >> from & ((uint64_t{1} << SECTOR) - 1)) != 0;
            }
        }
    }
    return counts;
}

void count_access(const void* at, unsigned bytes, bool write, const void* site) {
    if (!self) return;  // an initialiser of the library
    Worker& worker = current();
    Block& block = *worker.block;
    if (worker.uncounted || !block.counter) return;
    if (worker.waits && block.counter->is_global(at)) {
        fail(Fault::too_early, "this thread accesses global memory before wait_for_launches", {block.grid.source, 0});
    }
    block.counter->access(worker.warp, worker.lane, at, bytes, write, site);
}

void count_product(bool warpgroup, unsigned multiply_adds) {
    if (Counter* counter = current().block->counter.get()) counter->product(warpgroup, multiply_adds);
}

#ifdef SIMT_COUNT
void count_exponential() {
    if (Counter* counter = current().block->counter.get()) counter->exponential();
}
Uncounted::Uncounted() { current().uncounted++; }
Uncounted::~Uncounted() { current().uncounted--; }
#endif

}  // namespace simt

#ifdef SIMT_COUNT

// What code that is compiled with -fsanitize=thread calls, in place of the sanitizer's library.
#define SIMT_SITE __builtin_return_address(0)
#define SIMT_ACCESS(bytes)                                                                        \
    void __tsan_read##bytes(void* at) { simt::count_access(at, bytes, false, SIMT_SITE); }        \
    void __tsan_write##bytes(void* at) { simt::count_access(at, bytes, true, SIMT_SITE); }        \
    void __tsan_unaligned_read##bytes(void* at) { simt::count_access(at, bytes, false, SIMT_SITE); } \
    void __tsan_unaligned_write##bytes(void* at) { simt::count_access(at, bytes, true, SIMT_SITE); }
#define SIMT_ATOMIC(bits, T)                                                                                        \
    T __tsan_atomic##bits##_load(const volatile T* at, int) { return __atomic_load_n(at, __ATOMIC_RELAXED); }       \
    bool __tsan_atomic##bits##_compare_exchange_strong(volatile T* at, T* expected, T value, int, int) {            \
        simt::count_access(const_cast<T*>(at), bits / 8, true, SIMT_SITE);                                          \
        return __atomic_compare_exchange_n(at, expected, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);         \
    }

namespace {

// A structure of more than 16 bytes takes several instructions.
void count_range(const void* at, unsigned long bytes, bool write, const void* site) {
    for (unsigned long done = 0; done < bytes; done += 16) {
        const unsigned part = static_cast<unsigned>(std::min(bytes - done, 16ul));
        simt::count_access(static_cast<const unsigned char*>(at) + done, part, write, static_cast<const unsigned char*>(site) + done / 16);
    }
}

}  // namespace

extern "C" {

void __tsan_init(void) {}
SIMT_ACCESS(1)
SIMT_ACCESS(2)
SIMT_ACCESS(4)
SIMT_ACCESS(8)
SIMT_ACCESS(16)
void __tsan_read_range(void* at, unsigned long bytes) { count_range(at, bytes, false, SIMT_SITE); }
void __tsan_write_range(void* at, unsigned long bytes) { count_range(at, bytes, true, SIMT_SITE); }
SIMT_ATOMIC(16, uint16_t)
SIMT_ATOMIC(32, uint32_t)
SIMT_ATOMIC(64, uint64_t)

}  // extern "C"

#endif
