#include "launch.h"

#include <cstdarg>
#include <cstdio>
#include <memory>

#include "block.h"

namespace simt {

namespace {

thread_local Report last_report;

}  // namespace

Report& report() { return last_report; }

int report_fault(Fault code, const char* kernel, const Thread* thread, Place at, const char* why, ...) {
    Report& report = last_report;
    char text[512];
    va_list values;
    va_start(values, why);
    std::vsnprintf(text, sizeof text, why, values);
    va_end(values);
    report = {};
    report.code = static_cast<int>(code);
    if (thread) {
        const uint3 b = report.block = thread->block_idx, t = report.thread = thread->thread_idx;
        report.at = at;
        std::snprintf(report.message, sizeof report.message, "kernel %s, block (%u,%u,%u), thread (%u,%u,%u), %s:%d: %s", kernel,
                      b.x, b.y, b.z, t.x, t.y, t.z, at.file, at.line, text);
    } else {
        std::snprintf(report.message, sizeof report.message, "kernel %s: %s", kernel, text);
    }
    return report.code;
}

int launch(const char* kernel, const Grid& grid, void (*call)(void* const*), void* const* args) {
    const dim3 g = grid.grid, b = grid.block;
    const uint64_t threads = uint64_t{b.x} * b.y * b.z, blocks = uint64_t{g.x} * g.y * g.z;
    if (b.x > 1024 || b.y > 1024 || b.z > 64 || threads == 0 || threads > 1024) {
        return report_fault(Fault::bad_launch, kernel, nullptr, {}, "found a block of (%u,%u,%u) threads, expected 1 to 1024, at most 64 in z",
                   b.x, b.y, b.z);
    }
    if (blocks == 0 || g.x > 0x7fffffff || g.y > 65535 || g.z > 65535 || blocks > 0xffffffff) {
        return report_fault(Fault::bad_launch, kernel, nullptr, {},
                   "found a grid of (%u,%u,%u) blocks, expected at least 1, at most 2147483647 in x and 65535 in y and z", g.x, g.y,
                   g.z);
    }
    if (grid.shared_bytes > SIMT_SHARED_BYTES) {
        return report_fault(Fault::bad_launch, kernel, nullptr, {}, "found %u bytes of dynamic shared memory, expected at most %u",
                   grid.shared_bytes, SIMT_SHARED_BYTES);
    }

#ifndef SIMT_COUNT
    if (grid.counts) {
        return report_fault(Fault::bad_launch, kernel, nullptr, {}, "this library does not count: run cargo xtask build-kernels --sim --counts");
    }
#endif

    std::unique_ptr<Arena> arena(Arena::acquire(static_cast<unsigned>(threads)));
    int fault;
    {
        Block block(kernel, grid, call, args, *arena);
        std::vector<uint32_t> order(blocks);
        for (uint64_t i = 0; i < blocks; i++) order[i] = static_cast<uint32_t>(i);
        if (grid.seed) block.shuffle(order);
        for (const uint32_t index : order) {
            block.begin(index);
            block.run();
            acquire_order(&block.end_order);
            if (block.fault) break;
            if (block.counter) block.counter->end_block();
        }
        fault = block.fault;
        if (block.counter) *grid.counts = block.counter->counts();
    }
    if (!fault) {
        Arena::release(arena.release());
        last_report = {};
    }
    return fault;
}

}  // namespace simt
