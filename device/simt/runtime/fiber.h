// Fibers: a stack and a saved stack pointer, switched by hand, and reported to the sanitizers.
//
// This folder is compiled WITHOUT -fsanitize, because it runs below the code that is checked. It reports fibers to the
// sanitizer of the rest of the build, which SIMT_ADDRESS_SANITIZER or SIMT_THREAD_SANITIZER names.
#pragma once

#include <cstddef>

namespace simt {

struct Fiber {
    void* stack_pointer;
    const void* stack;  // lowest address
    size_t bytes;
    void* fake_stack;  // of the address sanitizer
    void* thread;      // of the thread sanitizer

    // Resets the fiber: the next switch to it calls `entry`, which never returns.
    void start(void (*entry)());
    // Create and destroy a thread for the thread sanitizer; `adopt` uses the one that is running.
    void create_thread();
    void adopt_thread();
    void destroy_thread();
};

// Switches from `from`, which never continues if `ends`, to `to`. Does not order the two for the thread sanitizer.
void switch_fiber(Fiber& from, Fiber& to, bool ends);
// The first call of a new fiber; `from` is the fiber that switched to it.
void after_first_switch(Fiber& from);

// Ordering for the thread sanitizer: accesses before a release happen before accesses after a later acquire.
void release_order(void* at);
void acquire_order(void* at);

// Mark memory as inaccessible or accessible for the address sanitizer.
void poison(const void* at, size_t bytes);
void unpoison(const void* at, size_t bytes);

}  // namespace simt
