// QUIRE_EXPORT(kernel): registers a kernel. Write it after the definition of every kernel. QUIRE_EXPORT_SHARED(kernel, bytes)
// registers a kernel whose blocks need `bytes` of dynamic shared memory; every launch gets at least that much. In the module of
// a GPU the number is the constant <kernel>_shared_bytes, which `device::cuda` reads when it loads the kernel.
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
    static Kernel describe(const char* name, const char* file, uint32_t shared_bytes) {
        return {name, file, call, bytes, sizeof...(Parameters), shared_bytes, nullptr};
    }
};
struct Registration {
    explicit Registration(Kernel* kernel) { register_kernel(kernel); }
};

}  // namespace simt

// In two steps, so that the name may be the result of a macro.
#define QUIRE_EXPORT(name) QUIRE_EXPORT_EXPANDED(name, 0)
#define QUIRE_EXPORT_SHARED(name, bytes) QUIRE_EXPORT_EXPANDED(name, bytes)
#define QUIRE_EXPORT_EXPANDED(name, bytes)                                                               \
    static simt::Kernel quire_kernel_##name = simt::Trampoline<&name>::describe(#name, __FILE__, bytes); \
    static const simt::Registration quire_entry_##name(&quire_kernel_##name)

#else

#define QUIRE_EXPORT(name) static_assert(true, #name)
#define QUIRE_EXPORT_SHARED(name, bytes) extern "C" __device__ const unsigned int name##_shared_bytes = bytes

#endif
