// QUIRE_EXPORT(kernel): registers a kernel. Write it after the definition of every kernel.
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
    const Kernel* next;
};
// Adds a kernel to the table of this library; called before main or by dlopen.
void register_kernel(Kernel* kernel);

template <auto kernel>
struct Trampoline;
template <class... Parameters, void (*kernel)(Parameters...)>
struct Trampoline<kernel> {
    static constexpr uint32_t bytes[] = {sizeof(Parameters)..., 0};

    template <size_t... i>
    static void unpack([[maybe_unused]] void* const* args, std::index_sequence<i...>) {
        kernel(*static_cast<Parameters*>(args[i])...);
    }
    static void call(void* const* args) { unpack(args, std::index_sequence_for<Parameters...>{}); }
    static Kernel describe(const char* name, const char* file) {
        return {name, file, call, bytes, sizeof...(Parameters), nullptr};
    }
};
struct Registration {
    explicit Registration(Kernel* kernel) { register_kernel(kernel); }
};

}  // namespace simt

// In two steps, so that the name may be the result of a macro.
#define QUIRE_EXPORT(name) QUIRE_EXPORT_EXPANDED(name)
#define QUIRE_EXPORT_EXPANDED(name)                                                               \
    static simt::Kernel quire_kernel_##name = simt::Trampoline<&name>::describe(#name, __FILE__); \
    static const simt::Registration quire_entry_##name(&quire_kernel_##name)

#else

#define QUIRE_EXPORT(name) static_assert(true, #name)

#endif
