// What device code on the host asks of the runtime (device/simt/runtime/): who am I, meet the others, stop here.
//
// Every CUDA thread is a fiber; all fibers of a launch run on the operating system thread that launched, one block
// after the other. Nothing here may be called outside of a running kernel.
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

// Dynamic shared memory: what `extern __shared__ ... smem[]` of every kernel names. As much as a block of sm_90 may have.
constexpr unsigned SIMT_SHARED_BYTES = 227 * 1024;
extern thread_local unsigned char smem[];

namespace simt {

// A CUDA thread, as its code sees it.
struct Thread {
    uint3 thread_idx, block_idx;
    dim3 block_dim, grid_dim;
    unsigned linear;  // within the block
    unsigned warp, lane;
};
extern thread_local Thread* self;

// A line of device code, for messages. As a default argument, `Place at = here()` is the line of the call.
struct Place {
    const char* file;
    int line;
};
constexpr Place here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line}; }

// Why a launch ended; the numbers are those of quire/sim.h.
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
};

// Ends the launch with this fault of the calling thread.
[[noreturn]] void fail(Fault fault, const char* why, Place at);

// How many threads of the block gave a value other than 0, and how many there are.
struct Votes {
    unsigned yes, threads;
};
// Waits for every thread of the block.
Votes barrier(bool vote, Place at);

// What lanes bring to a meeting of their warp: for each lane a row of as many bytes as each brings, at most so many.
constexpr unsigned ROW_BYTES = 64;
struct Rows {
    const unsigned char* first;
    unsigned lane;  // the one that asks
};
enum class Meeting : int { sync, shuffle, shuffle_xor, shuffle_down, shuffle_up, vote, match, reduce, mma, ldmatrix, wgmma };
// Waits until all lanes of `mask` have come to the same meeting, and returns what they brought, to be read before the
// next call. Only Meeting::sync orders memory.
Rows meet(unsigned mask, const void* value, unsigned bytes, Meeting meeting, Place at);
// Lanes of this warp that have not left the kernel.
unsigned live_lanes();

// Lets other threads run, now and then, under the seed of the launch: every order around an atomic may be seen.
void maybe_yield();

// A copy that cp.async has begun and that lands at the wait.
struct AsyncCopy {
    void* shared;
    const void* global;
    bool zero;
};
void async_begin(const AsyncCopy& copy);
void async_commit();
// Takes the oldest copy of this thread that may not be in flight any more once only `groups` groups are.
bool async_landed(unsigned groups, AsyncCopy& copy);

// An mbarrier in shared memory (async.cpp has its bits). `mbarrier_fence` is what makes those of this thread known to bulk copies.
void mbarrier_init(void* barrier, unsigned arrivals, Place at);
void mbarrier_fence();
void mbarrier_arrive(void* barrier, unsigned bytes, Place at);
// Waits for the end of the phase of that parity. Bulk copies land here, or where nobody could run otherwise; under a seed
// some land as soon as they begin.
void mbarrier_wait(void* barrier, unsigned parity, Place at);

// Barriers 1 to 15 of the block, for some of its threads.
void named_barrier(unsigned id, unsigned threads, bool wait, Place at);

// A bulk copy of a box, on its way to `bytes` bytes of shared memory from `shared` on.
struct BulkCopy {
    void* shared;
    unsigned bytes;
    void* barrier;
    const uint64_t* map;  // 16 words: a parameter of the thread, which may be gone when the copy lands
    int at[4];
};
void bulk_begin(const BulkCopy& copy, Place at);
// Whether one is on its way to this byte.
bool bulk_flies_to(const void* shared);

// A store of 16 bytes that the asynchronous proxy does not see before a fence of this thread.
struct UnfencedStore {
    void* shared;
    unsigned words[4];
};
void unfenced_store(const UnfencedStore& store);
// Takes the oldest one.
bool fenced_store(UnfencedStore& store);

// A wgmma on its way, as one thread sees it: its share of the sums, and its two rows of a.
struct Product {
    float* sums;
    unsigned count;              // of the sums
    bool accumulate, a_shared;
    const uint32_t* a_registers;  // of this thread; must not change until the wait
    uint32_t a_begun[4];
    float a[2][16];
    uint64_t a_matrix, b_matrix;
    // Adds the product to the sums.
    void (*land)(const Product& product, float* sums);
    Place at;
};
void product_fence();
void product_begin(const Product& product);
void product_commit();
// Takes the oldest product of this thread that may not be in flight any more once only `groups` groups are, with the sums
// that it adds to; `product_end` gives them back to the thread once no product adds to them.
bool product_landed(unsigned groups, Product& product, float*& sums);
void product_end(const Product& product);

}  // namespace simt
