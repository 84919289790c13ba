// Models of the instructions that quire/async.cuh and quire/wgmma.cuh wrap and describe.
//
// Asynchronous operations are as late as the rules allow: a copy is done when a thread waits for it, a product is computed at
// its wait, from the contents of shared memory at that time. Until then the memory that they write reads as NaN.
#pragma once

#include <cstring>

#include "shared_matrix.h"
#include "tile.h"

namespace simt {

// Returns the offset in dynamic shared memory, as a shared address of the device.
inline uint32_t shared_offset(const void* shared, Place at) {
    const auto offset = static_cast<const unsigned char*>(shared) - smem;
    if (offset < 0 || offset >= static_cast<ptrdiff_t>(SIMT_SHARED_BYTES)) {
        fail(Fault::bad_async, "asynchronous operations must use dynamic shared memory", at);
    }
    return static_cast<uint32_t>(offset);
}

// The source is read here too, so that the address sanitizer reports the line of the copy.
inline void bulk_load(void* shared, const void* map, const int (&at)[4], void* barrier, Place place) {
    const Uncounted model;
    const TensorMap& tensor = *static_cast<const TensorMap*>(map);
    if (tensor.magic != TensorMap::MAGIC) fail(Fault::bad_async, "the map of this copy is not a tensor map", place);
    if (shared_offset(shared, place) % 128) fail(Fault::misaligned, "the target of a bulk copy is not aligned to 128 bytes", place);
    each_chunk(tensor, at, shared, [](uint64_t* to, const uint64_t* from) {
        for (int i = 0; i < 2; i++) {
            if (from) asm volatile("" : : "r"(from[i]));
            to[i] = ~uint64_t{0};
        }
    });
    bulk_begin({shared, tensor.bytes(), barrier, static_cast<const uint64_t*>(map), {at[0], at[1], at[2], at[3]}}, place);
}

// The stored value is visible after the fence; before that, the memory reads as NaN.
inline void proxy_store(void* shared, const uint4& value, Place at) {
    if (!aligned16(shared)) fail(Fault::misaligned, "a store of 16 bytes is not aligned to 16 bytes", at);
    count(shared, 16, true, at);
    const Uncounted model;
    uint4* to = static_cast<uint4*>(shared);
    *to = {~0u, ~0u, ~0u, ~0u};
    unfenced_store({to, {value.x, value.y, value.z, value.w}});
}
inline void proxy_fence() {
    const Uncounted model;
    UnfencedStore store;
    while (next_unfenced_store(store)) *static_cast<uint4*>(store.shared) = {store.words[0], store.words[1], store.words[2], store.words[3]};
}

template <class T>
float element(const SharedMatrix& matrix, bool mn_major, unsigned mn, unsigned k, Place at) {
    const void* place = reinterpret_cast<const void*>(matrix.element(mn_major, mn, k));
    shared_offset(place, at);
    return *static_cast<const T*>(place);
}

// Computes rows lane / 4 and lane / 4 + 8 of the 16 rows of the warp, for the columns whose sums the lane holds.
template <class T, int N, bool B_MN_MAJOR>
void compute_product(const Product& product, float* sums) {
    const unsigned lane = self->lane, c = lane % 4 * 2, row = self->warp % 4 * 16 + lane / 4;
    float a[2][16];
    if (product.a_shared) {
        const SharedMatrix matrix(product.a_matrix, product.at);
        for (unsigned r = 0; r < 2; r++) {
            for (unsigned k = 0; k < 16; k++) a[r][k] = element<T>(matrix, false, row + 8 * r, k, product.at);
        }
    } else {
        std::memcpy(a, product.a, sizeof a);
    }
    const SharedMatrix b(product.b_matrix, product.at);
    for (unsigned n = 0; n < N / 4; n++) {
        float *above = sums + n / 2 * 4 + n % 2, *below = above + 2;
        float upper = product.accumulate ? *above : 0.0f, lower = product.accumulate ? *below : 0.0f;
        for (unsigned k = 0; k < 16; k++) {
            const float weight = element<T>(b, B_MN_MAJOR, n / 2 * 8 + c + n % 2, k, product.at);
            upper += a[0][k] * weight;
            lower += a[1][k] * weight;
        }
        *above = upper;
        *below = lower;
    }
}

// `a`: four registers, or null if a is the matrix `a_matrix`.
template <class T, int N, bool B_MN_MAJOR>
void wgmma(float* sums, const uint32_t* a, uint64_t a_matrix, uint64_t b_matrix, bool accumulate, Place at) {
    struct Operands {
        uint32_t a[4];
        uint64_t a_matrix, b_matrix;
    };
    Operands mine = {{}, a_matrix, b_matrix};
    Product product = {sums, N / 2, accumulate, !a, a, {}, {}, a_matrix, b_matrix, compute_product<T, N, B_MN_MAJOR>, at};
    for (int i = 0; a && i < 4; i++) mine.a[i] = product.a_begun[i] = a[i];
    // Before the collective, after which a lane may wait and so complete the copies. A row of a box is contiguous.
    if (self->lane == 0) {
        const SharedMatrix b(b_matrix, at);
        for (unsigned row = 0; row < (B_MN_MAJOR ? 16 * N / 64 : N); row++) {
            const uintptr_t first = B_MN_MAJOR ? b.element(true, row / 16 * 64, row % 16) : b.element(false, row, 0);
            if (bulk_pending_at(reinterpret_cast<const void*>(first))) {
                fail(Fault::bad_async, "a wgmma reads the target of a pending bulk copy: a wait for its mbarrier is missing", at);
            }
        }
    }
    const Rows rows = gather(ALL_LANES, &mine, sizeof mine, Collective::wgmma, at);
    const unsigned g = self->lane / 4;
    for (unsigned k = 0; a && k < 16; k++) {
        const Operands of_row = row<Operands>(rows, g * 4 + k % 8 / 2);
        for (unsigned r = 0; r < 2; r++) product.a[r][k] = lower_or_upper<T>(of_row.a[k / 8 * 2 + r], k % 2);
    }
    product_begin(product);
}

// Computes the products that are due, and synchronises the warp: the instruction is a collective of all its lanes.
inline void wgmma_wait(unsigned groups, Place at) {
    const Uncounted model;
    Product product;
    float* sums;
    while (next_due_product(groups, product, sums)) {
        product.compute(product, sums);
        finish_product(product);
    }
    gather(ALL_LANES, nullptr, 0, Collective::sync, at);
}

}  // namespace simt
