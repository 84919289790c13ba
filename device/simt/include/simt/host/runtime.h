// Interface of the runtime (device/simt/runtime/) for device code on the host: the identity of a thread, collectives, faults.
//
// Every CUDA thread is a fiber. All fibers of a launch run on the operating system thread that launched it, one block after
// the other. These functions may be called only from a running kernel.
#pragma once

#include <cstddef>
#include <cstdint>

struct uint3 {
    unsigned x, y, z;
};
struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

// Dynamic shared memory, which `extern __shared__ ... smem[]` of every kernel refers to. Its size is the maximum of a block of
// sm_90.
constexpr unsigned SIMT_SHARED_BYTES = 227 * 1024;
extern thread_local unsigned char smem[];

namespace simt {

// Identity of a CUDA thread.
struct Thread {
    uint3 thread_idx, block_idx;
    dim3 block_dim, grid_dim;
    unsigned linear;  // index within the block
    unsigned warp, lane;
};
extern thread_local Thread* self;

// Source location in device code, for messages. The default argument `Place at = here()` is the location of the call.
struct Place {
    const char* file;
    int line;
};
constexpr Place here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line}; }

// Why a launch failed; the numbers are those of quire/sim.h.
enum class Fault : int {
    unknown_kernel = 1,
    bad_launch = 2,
    divergent_barrier = 3,
    barrier_after_exit = 4,
    deadlock = 5,
    bad_mask = 6,
    divergent_collective = 7,
    bad_lane = 8,
    misaligned = 9,
    trap = 10,
    bad_async = 11,
    too_early = 12,
};

// Fails the launch with a fault of the calling thread.
[[noreturn]] void fail(Fault fault, const char* why, Place at);

// Number of threads of the block that voted yes, and number of threads.
struct Votes {
    unsigned yes, threads;
};
// Waits for every thread of the block.
Votes barrier(bool vote, Place at);

// Data that lanes contribute to a collective: for each lane a row of equal size, at most ROW_BYTES.
constexpr unsigned ROW_BYTES = 64;
struct Rows {
    const unsigned char* first;
    unsigned lane;  // the calling lane
};
enum class Collective : int { sync, shuffle, shuffle_xor, shuffle_down, shuffle_up, vote, match, reduce, mma, ldmatrix, wgmma };
// Waits until all lanes of `mask` have called the same collective, and returns what they contributed, to be read before the
// next call. Only Collective::sync orders memory.
Rows gather(unsigned mask, const void* value, unsigned bytes, Collective collective, Place at);
// Returns the lanes of this warp that have not exited.
unsigned live_lanes();

// Must precede the accesses of a thread to global memory, if its kernel says that it waits.
void wait_for_launches();

// Sometimes lets other threads run, depending on the seed of the launch, so that every order around an atomic can occur.
void maybe_yield();

// Counting: in a library that is compiled with SIMT_COUNT, every load and store of a kernel calls `count_access`. `site`
// identifies the instruction.
void count_access(const void* at, unsigned bytes, bool write, const void* site);
// Counts a product of the tensor cores; called by one thread of a warp or warpgroup.
void count_product(bool warpgroup, unsigned multiply_adds);
// Counts an exponential of a lane.
#ifdef SIMT_COUNT
void count_exponential();
#else
inline void count_exponential() {}
#endif
#ifdef SIMT_COUNT
// While it exists, loads and stores of the thread are not counted: the model of an instruction makes them.
struct Uncounted {
    Uncounted();
    ~Uncounted();
};
inline void count(const void* at, unsigned bytes, bool write, Place place) {
    count_access(at, bytes, write, place.file + place.line);
}
#define SIMT_UNCOUNTED __attribute__((no_sanitize("thread")))
#else
struct Uncounted {
    Uncounted() {}
};
inline void count(const void*, unsigned, bool, Place) {}
#define SIMT_UNCOUNTED
#endif

// A copy that cp.async has started; it is done at the wait.
struct AsyncCopy {
    void* shared;
    const void* global;
    unsigned bytes;  // 4 or 16
    bool zero;
};
void async_begin(const AsyncCopy& copy);
void async_commit();
// Takes the oldest copy of this thread that must be done when at most `groups` groups may be incomplete.
bool next_due_copy(unsigned groups, AsyncCopy& copy);

// An mbarrier in shared memory (async.cpp describes its bits). `mbarrier_fence` makes those of this thread visible to bulk
// copies.
void mbarrier_init(void* barrier, unsigned arrivals, Place at);
void mbarrier_fence();
void mbarrier_arrive(void* barrier, unsigned bytes, Place at);
// Waits until the phase of this parity has completed. Bulk copies are done here, or when no thread could run otherwise; with a
// seed, some are done as soon as they start.
void mbarrier_wait(void* barrier, unsigned parity, Place at);

// Arrives at barrier 1 to 15 of the block, which some of its threads use, and waits there if `wait`.
void named_barrier(unsigned id, unsigned threads, bool wait, Place at);

// A bulk copy of a box to `bytes` bytes of shared memory at `shared`.
struct BulkCopy {
    void* shared;
    unsigned bytes;
    void* barrier;
    const uint64_t* map;  // 16 words: a parameter of the thread, which may have exited when the copy is done
    int at[4];
};
void bulk_begin(const BulkCopy& copy, Place at);
// Returns whether a bulk copy to this byte is pending.
bool bulk_pending_at(const void* shared);

// A store of 16 bytes that the asynchronous proxy does not see before a fence in this thread.
struct UnfencedStore {
    void* shared;
    unsigned words[4];
};
void unfenced_store(const UnfencedStore& store);
// Takes the oldest unfenced store of this thread.
bool next_unfenced_store(UnfencedStore& store);

// The part of a pending wgmma that one thread computes: its sums, and its two rows of a.
struct Product {
    float* sums;
    unsigned count;              // number of sums
    bool accumulate, a_shared;
    const uint32_t* a_registers;  // must not change until the wait
    uint32_t a_begun[4];
    float a[2][16];
    uint64_t a_matrix, b_matrix;
    // Adds the product to the sums.
    void (*compute)(const Product& product, float* sums);
    Place at;
};
void product_fence();
void product_begin(const Product& product);
void product_commit();
// Takes the oldest product of this thread that must be done when at most `groups` groups may be incomplete, with the sums that
// it adds to. `finish_product` copies the sums to the thread once no pending product adds to them.
bool next_due_product(unsigned groups, Product& product, float*& sums);
void finish_product(const Product& product);

}  // namespace simt
