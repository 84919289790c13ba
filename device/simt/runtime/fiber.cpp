#include "fiber.h"

#include <cstdint>

#ifdef SIMT_ADDRESS_SANITIZER
extern "C" {
void __sanitizer_start_switch_fiber(void** fake_stack, const void* stack, size_t bytes);
void __sanitizer_finish_switch_fiber(void* fake_stack, const void** old_stack, size_t* old_bytes);
void __asan_poison_memory_region(const volatile void* at, size_t bytes);
void __asan_unpoison_memory_region(const volatile void* at, size_t bytes);
}
#endif
#ifdef SIMT_THREAD_SANITIZER
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* at);
void __tsan_release(void* at);
}
constexpr unsigned NO_ORDER = 1;  // flag of __tsan_switch_to_fiber: a switch does not synchronise, so races are reported
#endif

// Pushes the callee-saved registers, stores the stack pointer in *save, sets it to `load`, and pops the registers.
extern "C" void quire_simt_switch(void** save, void* load);

#if defined(__x86_64__)
asm(R"(
    .text
    .globl quire_simt_switch
    .hidden quire_simt_switch
    .type quire_simt_switch, @function
quire_simt_switch:
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbx
    pop %rbp
    ret
    .size quire_simt_switch, . - quire_simt_switch
)");
// Six registers, the address that `ret` jumps to, and an empty return address of `entry`, aligned as after a call.
constexpr size_t FRAME_WORDS = 8, ENTRY_WORD = 6;
#elif defined(__aarch64__)
asm(R"(
    .text
    .globl quire_simt_switch
    .hidden quire_simt_switch
    .type quire_simt_switch, %function
quire_simt_switch:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
    .size quire_simt_switch, . - quire_simt_switch
)");
// The registers above; `ret` jumps to x30, the twelfth.
constexpr size_t FRAME_WORDS = 20, ENTRY_WORD = 11;
#else
#error "the SIMT simulator supports x86-64 and aarch64 only"
#endif

namespace simt {

void Fiber::start(void (*entry)()) {
    const uintptr_t top = (reinterpret_cast<uintptr_t>(stack) + bytes) & ~uintptr_t{63};
    uintptr_t* frame = reinterpret_cast<uintptr_t*>(top) - FRAME_WORDS;
    for (size_t i = 0; i < FRAME_WORDS; i++) frame[i] = 0;
    frame[ENTRY_WORD] = reinterpret_cast<uintptr_t>(entry);
    stack_pointer = frame;
    fake_stack = nullptr;
}

void switch_fiber(Fiber& from, Fiber& to, [[maybe_unused]] bool ends) {
#ifdef SIMT_ADDRESS_SANITIZER
    __sanitizer_start_switch_fiber(ends ? nullptr : &from.fake_stack, to.stack, to.bytes);
#endif
#ifdef SIMT_THREAD_SANITIZER
    __tsan_switch_to_fiber(to.thread, NO_ORDER);
#endif
    quire_simt_switch(&from.stack_pointer, to.stack_pointer);
#ifdef SIMT_ADDRESS_SANITIZER
    __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
#endif
}

void after_first_switch([[maybe_unused]] Fiber& from) {
#ifdef SIMT_ADDRESS_SANITIZER
    __sanitizer_finish_switch_fiber(nullptr, &from.stack, &from.bytes);
#endif
}

#ifdef SIMT_THREAD_SANITIZER
void Fiber::create_thread() { thread = __tsan_create_fiber(0); }
void Fiber::adopt_thread() { thread = __tsan_get_current_fiber(); }
void Fiber::destroy_thread() { __tsan_destroy_fiber(thread); }
void release_order(void* at) { __tsan_release(at); }
void acquire_order(void* at) { __tsan_acquire(at); }
#else
void Fiber::create_thread() {}
void Fiber::adopt_thread() {}
void Fiber::destroy_thread() {}
void release_order(void*) {}
void acquire_order(void*) {}
#endif

#ifdef SIMT_ADDRESS_SANITIZER
void poison(const void* at, size_t bytes) { __asan_poison_memory_region(at, bytes); }
void unpoison(const void* at, size_t bytes) { __asan_unpoison_memory_region(at, bytes); }
#else
void poison(const void*, size_t) {}
void unpoison(const void*, size_t) {}
#endif

}  // namespace simt
