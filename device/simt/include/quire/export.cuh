// QUIRE_EXPORT(kernel); stands behind every kernel entry.
//
// nvcc gives an `extern "C" __global__` function its name in the module by itself, so there it is nothing. On the host
// it enters the kernel into the library's table, with a function that takes the same array of pointers to arguments as
// cuLaunchKernel and calls the kernel with its parameter types.
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
// Enters a kernel into the table of this library; called before main or by dlopen.
void enter(Kernel* kernel);

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
struct Entry {
    explicit Entry(Kernel* kernel) { enter(kernel); }
};

}  // namespace simt

// In two steps, so that a name may itself come from a macro.
#define QUIRE_EXPORT(name) QUIRE_EXPORT_EXPANDED(name)
#define QUIRE_EXPORT_EXPANDED(name)                                                               \
    static simt::Kernel quire_kernel_##name = simt::Trampoline<&name>::describe(#name, __FILE__); \
    static const simt::Entry quire_entry_##name(&quire_kernel_##name)

#else

#define QUIRE_EXPORT(name) static_assert(true, #name)

#endif
