// Fibers: a stack and a saved stack pointer, switched by hand, and told to the sanitizers.
//
// This folder is compiled WITHOUT -fsanitize: it is the machinery under the code that is examined. It reports to the
// sanitizer that the rest is built with: SIMT_ADDRESS_SANITIZER or SIMT_THREAD_SANITIZER is set then.
#pragma once

#include <cstddef>

namespace simt {

struct Fiber {
    void* stack_pointer;
    const void* stack;  // lowest address
    size_t bytes;
    void* fake_stack;  // of the address sanitizer
    void* thread;      // of the thread sanitizer

    // Points at a fresh start: the next switch to this fiber calls `entry`, which never returns.
    void start(void (*entry)());
    // Makes the thread sanitizer see a thread; `adopt` for the one that runs already.
    void create_thread();
    void adopt_thread();
    void destroy_thread();
};

// Leaves `from`, for good if `ends`, and continues `to`. Gives the thread sanitizer no order between the two.
void switch_fiber(Fiber& from, Fiber& to, bool ends);
// The first thing that a started fiber does: `from` is the one that switched to it.
void entered(Fiber& from);

// Order for the thread sanitizer: what came before a release comes before what follows a later acquire.
void release_order(void* at);
void acquire_order(void* at);

// Memory that must not be touched, for the address sanitizer.
void poison(const void* at, size_t bytes);
void unpoison(const void* at, size_t bytes);

}  // namespace simt
