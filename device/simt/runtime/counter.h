// Counts what a launch does: quire_sim_counts of sim.h.
//
// Lanes of a warp run one after the other, so a request is put together: the n-th access of one lane by an instruction, since
// the lanes last met, belongs to the n-th access of the other lanes by that instruction.
#pragma once

#include <cstdint>
#include <deque>
#include <unordered_map>
#include <vector>

#include "../include/quire/sim.h"
#include "arena.h"

namespace simt {

class Counter {
   public:
    // `private_memory`: ranges that belong to the simulator.
    Counter(unsigned threads, Span shared, std::vector<Span> private_memory);

    void access(unsigned warp, unsigned lane, const void* at, unsigned bytes, bool write, const void* site);
    bool is_global(const void* at) const { return !shared_.contains(at) && !is_private(at); }
    // A row of a box that the copy engine reads from global memory.
    void box_row(const void* from, unsigned bytes);
    void product(bool warpgroup, unsigned multiply_adds);
    void exponential() { counts_.exponentials++; }
    // Lanes of a warp are at the same place; all of them, if `whole`.
    void meet(unsigned warp, bool whole, Collective collective);
    void open_barrier();
    void open_named_barrier() { counts_.barriers++; }
    void end_block();
    quire_sim_counts counts() const;

   private:
    struct Request {
        unsigned lanes;
        uintptr_t at[WARP];
    };
    // An instruction: requests that may still get lanes, and the number of requests of each lane.
    struct Site {
        unsigned bytes;
        bool write, shared;
        uint64_t ended = 0;
        std::deque<Request> requests;
        uint64_t made[WARP] = {};

        Site(unsigned bytes, bool write, bool shared) : bytes(bytes), write(write), shared(shared) {}
    };
    struct Bytes {
        uint64_t read = 0, written = 0;  // a bit for each byte of 64
    };

    bool is_private(const void* at) const;
    void end_requests(unsigned warp);
    void end_request(const Site& site, const Request& request);
    void end_shared(const Site& site, const Request& request);
    void mark(uintptr_t at, unsigned bytes, bool write);

    Span shared_;
    std::vector<Span> private_;
    std::vector<std::unordered_map<uintptr_t, Site>> warps_;
    std::unordered_map<uintptr_t, Bytes> lines_;
    bool wrote_ = false;
    quire_sim_counts counts_ = {};
};

}  // namespace simt
