// QUIRE_EXPORT(kernel): registers a kernel. Write it after the definition of every kernel. QUIRE_EXPORT_SHARED(kernel, bytes)
// registers a kernel whose blocks need `bytes` of dynamic shared memory; every launch gets at least that much. In the module of
// a GPU the number is the constant <kernel>_shared_bytes, which `device::cuda` reads when it loads the kernel.
//
// QUIRE_EXPORT_OVERLAPPED(kernel, bytes) registers a kernel each of whose threads calls quire::wait_for_launches before it
// accesses global memory. From sm_90 on its blocks start while the launch before it drains (programmatic dependent launch, CUDA C++
// Programming Guide), which the constant <kernel>_overlaps tells `device::cuda`. A launch may leave out the wait only if it is not
// of such a kernel: the wait is complete when the launch before is, so it is only as good as the waits of all launches before.
//
// nvcc adds an `extern "C" __global__` function to its module by name, so there the macro does nothing. On the host it adds the
// kernel to the table of the library, with a function that takes the same array of argument pointers as cuLaunchKernel and
// calls the kernel with its parameter types.
#pragma once

#ifdef QUIRE_SIMT

#include <simt/cuda_runtime.h>

#include <cstdint>
#include <utility>

namespace simt {

struct Kernel {
    const char* name;
    const char* file;
    void (*call)(void* const* args);
    const uint32_t* parameter_bytes;
    uint32_t parameters;
    uint32_t shared_bytes;
    bool overlapped;  // its threads call wait_for_launches
    const Kernel* next;
};
// Adds a kernel to the table of this library; called before main or by dlopen.
void register_kernel(Kernel* kernel);

template <auto kernel>
struct Trampoline;
template <class... Parameters, void (*kernel)(Parameters...)>
struct Trampoline<kernel> {
    static constexpr uint32_t bytes[] = {sizeof(Parameters)..., 0};

    // Neither is counted, because parameters are not in global memory.
    template <size_t... i>
    SIMT_UNCOUNTED static void unpack([[maybe_unused]] void* const* args, std::index_sequence<i...>) {
        kernel(*static_cast<Parameters*>(args[i])...);
    }
    SIMT_UNCOUNTED static void call(void* const* args) { unpack(args, std::index_sequence_for<Parameters...>{}); }
    static Kernel describe(const char* name, const char* file, uint32_t shared_bytes, bool overlapped) {
        return {name, file, call, bytes, sizeof...(Parameters), shared_bytes, overlapped, nullptr};
    }
};
struct Registration {
    explicit Registration(Kernel* kernel) { register_kernel(kernel); }
};

}  // namespace simt

// In two steps, so that the name may be the result of a macro.
#define QUIRE_EXPORT(name) QUIRE_EXPORT_EXPANDED(name, 0, false)
#define QUIRE_EXPORT_SHARED(name, bytes) QUIRE_EXPORT_EXPANDED(name, bytes, false)
#define QUIRE_EXPORT_OVERLAPPED(name, bytes) QUIRE_EXPORT_EXPANDED(name, bytes, true)
#define QUIRE_EXPORT_EXPANDED(name, bytes, overlapped)                                                               \
    static simt::Kernel quire_kernel_##name = simt::Trampoline<&name>::describe(#name, __FILE__, bytes, overlapped); \
    static const simt::Registration quire_entry_##name(&quire_kernel_##name)

#else

#define QUIRE_EXPORT(name) static_assert(true, #name)
#define QUIRE_EXPORT_SHARED(name, bytes) extern "C" __device__ const unsigned int name##_shared_bytes = bytes
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define QUIRE_OVERLAPS 1
#else
#define QUIRE_OVERLAPS 0
#endif
#define QUIRE_EXPORT_OVERLAPPED(name, bytes)                                         \
    extern "C" __device__ const unsigned int name##_shared_bytes = bytes;            \
    extern "C" __device__ const unsigned int name##_overlaps = QUIRE_OVERLAPS

#endif

namespace quire {

// Lets blocks of the next launch start where multiprocessors have space for them, and waits until the launches before are complete
// and what they wrote can be read.
__device__ __forceinline__ void wait_for_launches() {
#if defined(QUIRE_SIMT)
    simt::wait_for_launches();
#elif QUIRE_OVERLAPS
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace quire
