// Layout of matrices and boxes in shared memory for the tensor cores and the copy engine of Hopper: swizzles, wgmma
// descriptors, and tensor maps.
//
// Source: PTX ISA, "Asynchronous warpgroup level matrix shared memory layout" (canonical layouts, strides, descriptor) and
// "Tensor data: swizzling modes".
#pragma once

#include <cstdint>

#include "runtime.h"

namespace simt {

// Returns the address of a byte whose 16-byte chunks are swizzled within `bytes` bytes (32, 64 or 128; 0: no swizzle): address
// bits from 4 on are XORed with bits from 7 on. The pattern repeats every 8 * bytes, so it depends on addresses, not on tiles.
inline uintptr_t swizzled(uintptr_t at, unsigned bytes) {
    return bytes ? at ^ ((at >> 7 & (bytes / 16 - 1)) << 4) : at;
}

// A decoded 64-bit descriptor.
struct SharedMatrix {
    uintptr_t start;  // address in this process
    unsigned leading, stride, swizzle;

    SharedMatrix(uint64_t descriptor, Place at)
        : start(reinterpret_cast<uintptr_t>(smem) + (descriptor & 0x3fff) * 16),
          leading(static_cast<unsigned>(descriptor >> 16 & 0x3fff) * 16),
          stride(static_cast<unsigned>(descriptor >> 32 & 0x3fff) * 16) {
        constexpr unsigned MODES[] = {0, 128, 64, 32};
        swizzle = MODES[descriptor >> 62];
        if (descriptor >> 49 & 7) fail(Fault::bad_async, "a matrix that starts inside of a swizzle pattern is not modelled", at);
    }

    // Returns the address of a 2-byte element: row `mn` of a or column `mn` of b, and `k`. `mn_major`: neighbours in memory are
    // neighbours in mn. In units of 16 bytes, T elements, the canonical layouts are, with a swizzle of s units,
    //   k major:   ((8, m), (T, 2)) : ((s T, stride), (1, T)), without a swizzle ((T, stride), (1, leading))
    //   mn major:  ((T, s, m), (8, k)) : ((1, T, leading), (s T, stride)), without one ((1, -, stride), (T, leading))
    uintptr_t element(bool mn_major, unsigned mn, unsigned k) const {
        uintptr_t at = start;
        if (!mn_major) {
            const unsigned row = swizzle ? swizzle : 16, chunk = swizzle ? 16 : leading;
            at += mn % 8 * row + mn / 8 * stride + k / 8 * chunk + k % 8 * 2;
        } else if (swizzle) {
            at += mn % (swizzle / 2) * 2 + mn / (swizzle / 2) * leading + k % 8 * swizzle + k / 8 * stride;
        } else {
            at += mn % 8 * 2 + mn / 8 * stride + k % 8 * 16 + k / 8 * leading;
        }
        return swizzled(at, swizzle);
    }
};

// The simulator's tensor map: 128 bytes, as on the device. Strides are those of the second to fourth dimension, in bytes.
struct TensorMap {
    uint64_t magic, address;
    uint32_t element_bytes, swizzle_bytes;
    uint64_t sizes[4], strides[3];
    uint32_t box[4];
    uint64_t unused[4];

    static constexpr uint64_t MAGIC = 0x70616d726f736e74;
    unsigned row_bytes() const { return box[0] * element_bytes; }
    unsigned bytes() const { return row_bytes() * box[1] * box[2] * box[3]; }
};
static_assert(sizeof(TensorMap) == 128, "as large as the device's");

// Calls each(to, from) for every 16 bytes of a box, with target and source; the source is null outside of the tensor.
template <class Each>
void each_chunk(const TensorMap& map, const int (&at)[4], void* shared, Each each) {
    uintptr_t to = reinterpret_cast<uintptr_t>(shared);
    unsigned i[4];
    for (i[3] = 0; i[3] < map.box[3]; i[3]++) {
        for (i[2] = 0; i[2] < map.box[2]; i[2]++) {
            for (i[1] = 0; i[1] < map.box[1]; i[1]++) {
                for (i[0] = 0; i[0] < map.box[0]; i[0] += 16 / map.element_bytes, to += 16) {
                    uint64_t from = map.address;
                    bool inside = true;
                    for (int d = 0; d < 4; d++) {
                        const int64_t x = int64_t{at[d]} + i[d];
                        inside = inside && x >= 0 && x < static_cast<int64_t>(map.sizes[d]);
                        from += static_cast<uint64_t>(x) * (d ? map.strides[d - 1] : map.element_bytes);
                    }
                    each(reinterpret_cast<uint64_t*>(swizzled(to, map.swizzle_bytes)),
                         inside ? reinterpret_cast<const uint64_t*>(from) : nullptr);
                }
            }
        }
    }
}

}  // namespace simt
