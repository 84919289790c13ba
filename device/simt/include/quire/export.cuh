// QUIRE_EXPORT(kernel): registers a kernel. Write it after the definition of every kernel. QUIRE_EXPORT_SHARED(kernel, bytes)
// registers a kernel whose blocks need `bytes` of dynamic shared memory; every launch gets at least that much.
//
// QUIRE_EXPORT_OVERLAPPED(kernel, bytes) registers a kernel each of whose threads calls quire::wait_for_launches before it
// accesses global memory. From sm_90 on its blocks start while the launch before it drains (programmatic dependent launch, CUDA C++
// Programming Guide). A launch may leave out the wait only if it is not of such a kernel: the wait is complete when the launch
// before is, so it is only as good as the waits of all launches before.
//
// QUIRE_EXPORT_TILED(kernel, bytes, threads, rows) registers such a kernel whose blocks have `threads` threads and compute `rows`
// rows, which `Device::tile` returns, so that the code that launches it does not repeat them.
//
// nvcc adds an `extern "C" __global__` function to its module by name. There the macro defines the constant <kernel>_traits, with
// the number of parameters and what the macro says, which `device::cuda` reads when it loads the kernel. On the host it adds the
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
    uint32_t threads, rows;  // of a block; 0 if the kernel does not say
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
    static Kernel describe(const char* name, const char* file, uint32_t shared_bytes, bool overlapped, uint32_t threads,
                           uint32_t rows) {
        return {name, file, call, bytes, sizeof...(Parameters), shared_bytes, overlapped, threads, rows, nullptr};
    }
};
struct Registration {
    explicit Registration(Kernel* kernel) { register_kernel(kernel); }
};

}  // namespace simt

#define QUIRE_OVERLAPS true
#define QUIRE_EXPORT_EXPANDED(name, bytes, overlaps, threads, rows)                             \
    static simt::Kernel quire_kernel_##name =                                                   \
        simt::Trampoline<&name>::describe(#name, __FILE__, bytes, overlaps, threads, rows);     \
    static const simt::Registration quire_entry_##name(&quire_kernel_##name)

#else

namespace quire {

template <class Kernel>
struct ParameterCount;
template <class... Parameters>
struct ParameterCount<void(Parameters...)> {
    static constexpr unsigned int VALUE = sizeof...(Parameters);
};

}  // namespace quire

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define QUIRE_OVERLAPS 1
#else
#define QUIRE_OVERLAPS 0
#endif
#define QUIRE_EXPORT_EXPANDED(name, bytes, overlaps, threads, rows)    \
    extern "C" __device__ const unsigned int name##_traits[5] = {      \
        quire::ParameterCount<decltype(name)>::VALUE, bytes, overlaps, threads, rows}

#endif

// In two steps, so that the name may be the result of a macro.
#define QUIRE_EXPORT(name) QUIRE_EXPORT_EXPANDED(name, 0, 0, 0, 0)
#define QUIRE_EXPORT_SHARED(name, bytes) QUIRE_EXPORT_EXPANDED(name, bytes, 0, 0, 0)
#define QUIRE_EXPORT_OVERLAPPED(name, bytes) QUIRE_EXPORT_EXPANDED(name, bytes, QUIRE_OVERLAPS, 0, 0)
#define QUIRE_EXPORT_TILED(name, bytes, threads, rows) QUIRE_EXPORT_EXPANDED(name, bytes, QUIRE_OVERLAPS, threads, rows)

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
