// Launches: a grid of blocks, run one after the other on the calling thread.
#pragma once

#include <cstdint>

#include "../include/quire/sim.h"
#include "../include/simt/host/runtime.h"

namespace simt {

struct Grid {
    dim3 grid, block;
    unsigned shared_bytes;
    bool overlapped;     // its threads must call wait_for_launches
    const char* source;  // file of the kernel
    uint64_t seed;
    quire_sim_counts* counts;  // null: nothing is counted
};

// The fault of the last launch of the calling thread.
struct Report {
    int code;  // 0 after a launch without a fault
    uint3 block, thread;
    Place at;
    char message[768];
};
Report& report();
// Fills the report of this thread and returns the code. `thread` and the place may be empty; `why` is a format of printf.
int report_fault(Fault code, const char* kernel, const Thread* thread, Place at, const char* why, ...)
    __attribute__((format(printf, 5, 6)));

// Runs `call(args)` once for every thread of the grid. Returns 0 or the code of the fault.
int launch(const char* kernel, const Grid& grid, void (*call)(void* const*), void* const* args);

}  // namespace simt
