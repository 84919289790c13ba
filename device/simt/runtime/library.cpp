// The table of kernels and the C interface of quire/sim.h.
#include <algorithm>
#include <cstring>
#include <new>
#include <vector>

#include "../include/quire/export.cuh"
#include "../include/quire/sim.h"
#include "launch.h"
#undef threadIdx
#undef blockIdx
#undef blockDim
#undef gridDim

namespace simt {

namespace {

Kernel* last_registered;

// Returns the kernels sorted by name. Built at the first use, when all kernels are registered.
const std::vector<const Kernel*>& table() {
    static const std::vector<const Kernel*> kernels = [] {
        std::vector<const Kernel*> list;
        for (const Kernel* kernel = last_registered; kernel; kernel = kernel->next) list.push_back(kernel);
        std::sort(list.begin(), list.end(),
                  [](const Kernel* a, const Kernel* b) { return std::strcmp(a->name, b->name) < 0; });
        return list;
    }();
    return kernels;
}

const Kernel* find(const char* name) {
    const auto& kernels = table();
    const auto at = std::lower_bound(kernels.begin(), kernels.end(), name, [](const Kernel* kernel, const char* name) {
        return std::strcmp(kernel->name, name) < 0;
    });
    return at != kernels.end() && std::strcmp((*at)->name, name) == 0 ? *at : nullptr;
}

dim3 size(const uint32_t n[3]) { return {n[0], n[1], n[2]}; }

thread_local const char* launched;  // the kernel of the last launch of this thread

}  // namespace

void register_kernel(Kernel* kernel) {
    kernel->next = last_registered;
    last_registered = kernel;
}

}  // namespace simt

extern "C" {

uint32_t quire_sim_abi(void) { return QUIRE_SIM_ABI; }

size_t quire_sim_kernel_count(void) { return simt::table().size(); }

quire_sim_kernel quire_sim_kernel_at(size_t index) {
    const simt::Kernel& kernel = *simt::table()[index];
    return {kernel.name, kernel.file, kernel.parameter_bytes, kernel.parameters, kernel.shared_bytes,
            kernel.overlapped, kernel.threads, kernel.rows};
}

int32_t quire_sim_launch(const char* name, const uint32_t grid[3], const uint32_t block[3], uint32_t shared_bytes,
                         void* const* args, const quire_sim_options* options) {
    const simt::Kernel* kernel = simt::find(name);
    const uint32_t needed = kernel ? std::max(kernel->shared_bytes, shared_bytes) : shared_bytes;
    const bool overlapped = kernel && kernel->overlapped;
    const char* source = kernel ? kernel->file : "";
    const simt::Grid shape{simt::size(grid), simt::size(block), needed, overlapped, source, options->seed, options->counts};
    int code;
    if (!kernel) {
        code = simt::report_fault(simt::Fault::unknown_kernel, name, nullptr, {},
                                  "found no kernel of this name among the %zu kernels of the library",
                         simt::table().size());
    } else {
        try {
            code = simt::launch(kernel->name, shape, kernel->call, args);
        } catch (const std::bad_alloc&) {
            code = simt::report_fault(simt::Fault::bad_launch, name, nullptr, {}, "the host has not enough memory for its threads");
        }
    }
    simt::launched = kernel ? kernel->name : "";
    return code;
}

quire_sim_fault quire_sim_last_error(void) {
    const simt::Report& report = simt::report();
    return {report.code,
            {report.block.x, report.block.y, report.block.z},
            {report.thread.x, report.thread.y, report.thread.z},
            report.at.line,
            simt::launched ? simt::launched : "",
            report.at.file ? report.at.file : "",
            report.message};
}

}  // extern "C"
