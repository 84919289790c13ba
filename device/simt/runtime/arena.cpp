#include "arena.h"

#include <sys/mman.h>
#include <unistd.h>

#include <mutex>
#include <new>
#include <vector>

#include "fiber.h"

namespace simt {

namespace {

size_t page() {
    static const size_t bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    return bytes;
}

std::mutex cache_lock;
std::vector<Arena*>& cache() {
    // Never destroyed, because a launch may still run while the process exits.
    static std::vector<Arena*>* arenas = new std::vector<Arena*>;
    return *arenas;
}

// A library may be opened and closed many times in one process, which can have only some ten thousand guard pages. So cached
// arenas are deleted when the library is closed.
__attribute__((destructor)) void clear_cache() {
    std::lock_guard<std::mutex> lock(cache_lock);
    for (Arena* arena : cache()) delete arena;
    cache().clear();
}

}  // namespace

Arena::Arena(unsigned threads) : threads_(threads) {
    const size_t stacks = threads * (STACK_BYTES + page());
    bytes_ = stacks + (threads + WARP - 1) / WARP * sizeof(Warp);
    void* memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    memory_ = static_cast<unsigned char*>(memory);
    warps_ = reinterpret_cast<Warp*>(memory_ + stacks);
    for (unsigned thread = 0; thread < threads; thread++) mprotect(stack(thread) - page(), page(), PROT_NONE);
}

Arena::~Arena() {
    unpoison(memory_, bytes_);  // abandoned fibers leave poisoned frames
    munmap(memory_, bytes_);
}

unsigned char* Arena::stack(unsigned thread) const { return memory_ + thread * (STACK_BYTES + page()) + page(); }

Arena* Arena::acquire(unsigned threads) {
    {
        std::lock_guard<std::mutex> lock(cache_lock);
        auto& arenas = cache();
        for (size_t i = 0; i < arenas.size(); i++) {
            Arena* arena = arenas[i];
            if (arena->threads_ < threads) continue;
            arenas.erase(arenas.begin() + static_cast<ptrdiff_t>(i));
            return arena;
        }
    }
    return new Arena((threads + WARP - 1) / WARP * WARP);
}

void Arena::release(Arena* arena) {
    std::lock_guard<std::mutex> lock(cache_lock);
    cache().push_back(arena);
}

}  // namespace simt
