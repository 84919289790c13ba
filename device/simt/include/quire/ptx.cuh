// Wrappers of inline PTX for tensor core products, the loads that feed them, asynchronous copies, and exponentials. Inline PTX is
// used only in this folder.
//
// Each wrapper has two bodies side by side: a model for the host (device/simt), and the instruction for nvcc. Layouts are
// those of the PTX ISA, sections "Matrix fragments for mma.m16n8k16" and "ldmatrix".
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include <type_traits>

#ifdef QUIRE_SIMT
#include <simt/host/tile.h>
#endif

namespace quire {

// Source line of a call, for messages of the simulator; empty under nvcc.
#ifdef QUIRE_SIMT
using simt::here;
using simt::Place;
#else
struct Place {};
__device__ __forceinline__ Place here() { return {}; }

// Returns an address in the shared state space, as instructions take it.
__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}
#endif

// Computes d += a * b for a 16x16 tile a (row-major), a 16x8 tile b (column-major) and a 16x8 tile d of float. T, the type of a
// and b, is __half or __nv_bfloat16. All 32 lanes take part. With g = lane / 4 and c = lane % 4 * 2, a lane holds the following
// elements; the lower column (of a) or row (of b) is in the lower half of a register:
//
//   a[0]  row g,      columns c, c + 1           b[0]  rows c,     c + 1,  column g
//   a[1]  row g + 8,  columns c, c + 1           b[1]  rows c + 8, c + 9,  column g
//   a[2]  row g,      columns c + 8, c + 9       d[0], d[1]  row g,      columns c, c + 1
//   a[3]  row g + 8,  columns c + 8, c + 9       d[2], d[3]  row g + 8,  columns c, c + 1
template <class T>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                                             [[maybe_unused]] Place at = here()) {
    static_assert(std::is_same_v<T, __half> || std::is_same_v<T, __nv_bfloat16>, "tiles are f16 or bf16");
#ifdef QUIRE_SIMT
    simt::mma_m16n8k16<T>(d, a, b, at);
#else
    if constexpr (std::is_same_v<T, __half>) {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    } else {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    }
#endif
}

// Loads N (1, 2 or 4) tiles of 8x8 16-bit numbers from shared memory, with all 32 lanes. Lane 8 i + j passes the address of row
// j of tile i: 16 bytes, aligned to 16; addresses of lanes from 8 N on are ignored. Afterwards tile[i] of a lane holds columns
// lane % 4 * 2 and the next of row lane / 4 of tile i.
template <int N>
__device__ __forceinline__ void ldmatrix(uint32_t (&tile)[N], const void* row, [[maybe_unused]] Place at = here()) {
    static_assert(N == 1 || N == 2 || N == 4, "ldmatrix loads 1, 2 or 4 tiles");
#ifdef QUIRE_SIMT
    simt::ldmatrix<false>(tile, row, at);
#else
    const uint32_t address = shared_address(row);
    if constexpr (N == 1) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0},[%1];" : "=r"(tile[0]) : "r"(address) : "memory");
    } else if constexpr (N == 2) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1},[%2];"
                     : "=r"(tile[0]), "=r"(tile[1])
                     : "r"(address)
                     : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];"
                     : "=r"(tile[0]), "=r"(tile[1]), "=r"(tile[2]), "=r"(tile[3])
                     : "r"(address)
                     : "memory");
    }
#endif
}

// As ldmatrix, with each tile transposed: a lane gets rows lane % 4 * 2 and the next of column lane / 4.
template <int N>
__device__ __forceinline__ void ldmatrix_trans(uint32_t (&tile)[N], const void* row,
                                               [[maybe_unused]] Place at = here()) {
    static_assert(N == 1 || N == 2 || N == 4, "ldmatrix loads 1, 2 or 4 tiles");
#ifdef QUIRE_SIMT
    simt::ldmatrix<true>(tile, row, at);
#else
    const uint32_t address = shared_address(row);
    if constexpr (N == 1) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0},[%1];"
                     : "=r"(tile[0])
                     : "r"(address)
                     : "memory");
    } else if constexpr (N == 2) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1},[%2];"
                     : "=r"(tile[0]), "=r"(tile[1])
                     : "r"(address)
                     : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3},[%4];"
                     : "=r"(tile[0]), "=r"(tile[1]), "=r"(tile[2]), "=r"(tile[3])
                     : "r"(address)
                     : "memory");
    }
#endif
}

// Starts a copy of 16 bytes from global to shared memory, both aligned to 16, in the open group of this thread. If not `valid`,
// zeros are written and `global` is not read (it must still be an address).
__device__ __forceinline__ void cp_async16(void* shared, const void* global, bool valid = true,
                                           [[maybe_unused]] Place at = here()) {
#ifdef QUIRE_SIMT
    simt::cp_async<uint4>(shared, global, valid, at);
#else
    asm volatile("{.reg .pred zeros; setp.eq.u32 zeros,%2,0; cp.async.cg.shared.global [%0],[%1],16,zeros;}" ::"r"(
                     shared_address(shared)),
                 "l"(global), "r"(static_cast<uint32_t>(valid))
                 : "memory");
#endif
}

// The same for 4 bytes, aligned to 4.
__device__ __forceinline__ void cp_async4(void* shared, const void* global, bool valid = true,
                                          [[maybe_unused]] Place at = here()) {
#ifdef QUIRE_SIMT
    simt::cp_async<uint32_t>(shared, global, valid, at);
#else
    asm volatile("{.reg .pred zeros; setp.eq.u32 zeros,%2,0; cp.async.ca.shared.global [%0],[%1],4,zeros;}" ::"r"(
                     shared_address(shared)),
                 "l"(global), "r"(static_cast<uint32_t>(valid))
                 : "memory");
#endif
}

// Closes the open group of this thread and opens the next one.
__device__ __forceinline__ void cp_async_commit() {
#ifdef QUIRE_SIMT
    simt::async_commit();
#else
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most the N newest groups of this thread are incomplete. Other threads see the copied data after a barrier.
template <int N>
__device__ __forceinline__ void cp_async_wait() {
#ifdef QUIRE_SIMT
    simt::cp_async_wait(N);
#else
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#endif
}

// Returns (x & mask) ^ flipped, as one instruction also where both are constants.
__device__ __forceinline__ uint32_t and_xor(uint32_t x, uint32_t mask, uint32_t flipped) {
#ifdef QUIRE_SIMT
    return (x & mask) ^ flipped;
#else
    uint32_t word;
    asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(word) : "r"(x), "r"(mask), "r"(flipped));
    return word;
#endif
}

// Returns (x & mask) | set, as one instruction also where both are constants.
__device__ __forceinline__ uint32_t and_or(uint32_t x, uint32_t mask, uint32_t set) {
#ifdef QUIRE_SIMT
    return (x & mask) | set;
#else
    uint32_t word;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(word) : "r"(x), "r"(mask), "r"(set));
    return word;
#endif
}

// Returns 2 to the power `power`; results below the smallest normal number are 0, as from the instruction [ex2: .approx.ftz].
__device__ __forceinline__ float exp2_approx(float power) {
    float value;
#ifdef QUIRE_SIMT
    simt::count_exponential();
    value = exp2f(power);
    if (value < 1.17549435e-38f) value = 0.0f;
#else
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(power));
#endif
    return value;
}

}  // namespace quire
