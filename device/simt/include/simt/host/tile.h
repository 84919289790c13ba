// Models of the instructions that quire/ptx.cuh wraps and describes.
#pragma once

#include <cstring>

#include "../cuda_bf16.h"
#include "../cuda_fp16.h"
#include "warp.h"

namespace simt {

constexpr unsigned ALL_LANES = ~0u;

inline bool aligned16(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

template <class T>
float lower_or_upper(uint32_t pair, unsigned upper) {
    return bit_cast<T>(static_cast<unsigned short>(upper ? pair >> 16 : pair));
}

// Products are exact in float and are added in order of k; the device adds them in an unspecified order.
template <class T>
void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Place at) {
    struct Fragments {
        uint32_t a[4], b[2];
    };
    const Fragments mine = {{a[0], a[1], a[2], a[3]}, {b[0], b[1]}};
    const Rows rows = gather(ALL_LANES, &mine, sizeof mine, Collective::mma, at);
    if (self->lane == 0) count_product(false, 16 * 8 * 16);
    const unsigned g = self->lane / 4, c = self->lane % 4 * 2;
    for (unsigned k = 0; k < 16; k++) {
        // The lane of a group of four that holds column k of a row and row k of a column, and its register half.
        const unsigned holder = k % 8 / 2, deferred = k / 8, upper = k % 2;
        const Fragments of_row = row<Fragments>(rows, g * 4 + holder);
        const float above = lower_or_upper<T>(of_row.a[2 * deferred], upper);
        const float below = lower_or_upper<T>(of_row.a[2 * deferred + 1], upper);
        for (unsigned n = 0; n < 2; n++) {
            const float weight = lower_or_upper<T>(row<Fragments>(rows, (c + n) * 4 + holder).b[deferred], upper);
            d[n] += above * weight;
            d[2 + n] += below * weight;
        }
    }
}

template <bool transposed, int N>
void ldmatrix(uint32_t (&tile)[N], const void* address, Place at) {
    const unsigned lane = self->lane;
    if (lane < 8 * N && !aligned16(address)) fail(Fault::misaligned, "a row of ldmatrix is not aligned to 16 bytes", at);
    if (lane < 8 * N) count(address, 16, false, at);
    const Rows rows = gather(ALL_LANES, &address, sizeof address, Collective::ldmatrix, at);
    const Uncounted model;
    const auto number = [&](unsigned i, unsigned r, unsigned column) -> uint32_t {
        return row<const unsigned short*>(rows, 8 * i + r)[column];
    };
    for (unsigned i = 0; i < N; i++) {
        const unsigned x = lane / 4, y = lane % 4 * 2;
        const uint32_t low = transposed ? number(i, y, x) : number(i, x, y);
        const uint32_t high = transposed ? number(i, y + 1, x) : number(i, x, y + 1);
        tile[i] = high << 16 | low;
    }
}

// The copy of a Vector is done at the wait; until then its target reads as NaN. The source is read here too, so that the address
// sanitizer reports the line of the copy.
template <class Vector>
void cp_async(void* shared, const void* global, bool valid, Place at) {
    const auto aligned = [](const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % sizeof(Vector) == 0; };
    if (!aligned(shared) || !aligned(global)) fail(Fault::misaligned, "an address of cp.async is not aligned to its size", at);
    if (valid) count(global, sizeof(Vector), false, at);
    count(shared, sizeof(Vector), true, at);
    const Uncounted model;
    if (valid) {
        Vector probe = *static_cast<const Vector*>(global);
        asm volatile("" : : "m"(probe));
    }
    Vector poison;
    memset(&poison, 0xff, sizeof poison);
    *static_cast<Vector*>(shared) = poison;
    async_begin({shared, global, sizeof(Vector), !valid});
}

inline void cp_async_wait(unsigned groups) {
    const Uncounted model;
    AsyncCopy copy;
    while (next_due_copy(groups, copy)) {
        const bool is_vector = copy.bytes == sizeof(uint4);
        if (is_vector) *static_cast<uint4*>(copy.shared) = copy.zero ? uint4{} : *static_cast<const uint4*>(copy.global);
        else *static_cast<uint32_t*>(copy.shared) = copy.zero ? 0 : *static_cast<const uint32_t*>(copy.global);
    }
}

}  // namespace simt
