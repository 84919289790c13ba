// Features of Hopper: mbarriers, the copy engine (TMA), named barriers, and register reallocation.
//
// As in ptx.cuh, each wrapper has a model for the host, and the instruction of sm_90 (setmaxnreg: sm_90a). The names in
// brackets are sections of the PTX ISA.
#pragma once

#include "ptx.cuh"

#ifdef QUIRE_SIMT
#include <simt/host/hopper.h>
#endif

namespace quire {

// A tensor of four dimensions in global memory and the size of its boxes, made by device::Arg::tensor; on a GPU by
// cuTensorMapEncodeTiled. As a kernel parameter: `const __grid_constant__ TensorMap`.
#ifdef QUIRE_SIMT
using simt::TensorMap;
#else
struct alignas(128) TensorMap {
    uint64_t words[16];
};
#endif

// Initialises 8 bytes of shared memory as an mbarrier whose phases take `arrivals` arrivals [mbarrier.init]. One thread calls
// this once, followed by `mbarrier_init_fence` in the same thread and a barrier of the block.
__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, uint32_t arrivals, [[maybe_unused]] Place at = here()) {
#ifdef QUIRE_SIMT
    simt::mbarrier_init(barrier, arrivals, at);
#else
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
#endif
}

// Makes the mbarriers that this thread initialised visible to the copy engine [membar / fence: .mbarrier_init].
__device__ __forceinline__ void mbarrier_init_fence() {
#ifdef QUIRE_SIMT
    simt::mbarrier_fence();
#else
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

// Arrives once [mbarrier.arrive]. Earlier writes of this thread are visible to threads that wait for the phase.
__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier, [[maybe_unused]] Place at = here()) {
#ifdef QUIRE_SIMT
    simt::mbarrier_arrive(barrier, 0, at);
#else
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
#endif
}

// Arrives once, and adds `bytes` to the bytes that copies must deliver before the phase completes [mbarrier.arrive:
// .expect_tx].
__device__ __forceinline__ void mbarrier_arrive_expect(uint64_t* barrier, uint32_t bytes,
                                                       [[maybe_unused]] Place at = here()) {
#ifdef QUIRE_SIMT
    simt::mbarrier_arrive(barrier, bytes, at);
#else
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
#endif
}

// Waits until the phase with this parity has completed [mbarrier.try_wait: .parity]. The first phase has parity 0; a new
// mbarrier behaves as if a phase of parity 1 had just completed.
__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, uint32_t parity, [[maybe_unused]] Place at = here()) {
#ifdef QUIRE_SIMT
    simt::mbarrier_wait(barrier, parity, at);
#else
    const uint32_t address = shared_address(barrier);
    uint32_t ended;
    do {
        asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                     : "=r"(ended)
                     : "r"(address), "r"(parity)
                     : "memory");
    } while (!ended);
#endif
}

// Starts a copy of one box to shared memory, at a multiple of 128 bytes, in the swizzle of the map [cp.async.bulk.tensor]. x,
// y, z and w are the coordinates of its first element, fastest dimension first. Elements outside of the tensor become zeros.
// The mbarrier counts all bytes of the box.
__device__ __forceinline__ void load_box(void* shared, const TensorMap& map, int x, int y, int z, int w, uint64_t* barrier,
                                         [[maybe_unused]] Place at = here()) {
#ifdef QUIRE_SIMT
    simt::bulk_load(shared, &map, {x, y, z, w}, barrier, at);
#else
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(
            shared_address(shared)),
        "l"(&map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(shared_address(barrier))
        : "memory");
#endif
}

// Stores 16 bytes to shared memory that the tensor cores will read or the copy engine will overwrite. They see the store after
// `proxy_fence` in this thread and a barrier.
__device__ __forceinline__ void proxy_store(void* shared, const uint4& value, [[maybe_unused]] Place at = here()) {
#ifdef QUIRE_SIMT
    simt::proxy_store(shared, value, at);
#else
    *static_cast<uint4*>(shared) = value;
#endif
}

// Orders ordinary accesses of this thread to shared memory before asynchronous accesses [membar / fence: .proxy.async].
__device__ __forceinline__ void proxy_fence() {
#ifdef QUIRE_SIMT
    simt::proxy_fence();
#else
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Waits at barrier `id`, 1 to 15, for `threads` threads of the block, in whole warps [bar / barrier: .sync].
__device__ __forceinline__ void named_barrier_sync(uint32_t id, uint32_t threads, [[maybe_unused]] Place at = here()) {
#ifdef QUIRE_SIMT
    simt::named_barrier(id, threads, true, at);
#else
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
#endif
}

// Arrives at such a barrier without waiting [bar / barrier: .arrive].
__device__ __forceinline__ void named_barrier_arrive(uint32_t id, uint32_t threads, [[maybe_unused]] Place at = here()) {
#ifdef QUIRE_SIMT
    simt::named_barrier(id, threads, false, at);
#else
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
#endif
}

// Sets the number of registers per thread for the rest of this warpgroup [setmaxnreg]: `give_registers` lowers it,
// `take_registers` raises it. All warps of the warpgroup must call it. On the host they do nothing.
template <uint32_t COUNT>
__device__ __forceinline__ void give_registers() {
    static_assert(COUNT % 8 == 0 && COUNT >= 24 && COUNT <= 256, "a multiple of 8 from 24 to 256");
#ifndef QUIRE_SIMT
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
#endif
}
template <uint32_t COUNT>
__device__ __forceinline__ void take_registers() {
    static_assert(COUNT % 8 == 0 && COUNT >= 24 && COUNT <= 256, "a multiple of 8 from 24 to 256");
#ifndef QUIRE_SIMT
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
#endif
}

}  // namespace quire
