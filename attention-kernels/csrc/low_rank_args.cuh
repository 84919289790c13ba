// Arguments of the low-rank kernels: pointers as separate parameters, then the shape by value. The table of a step has the number of
// tasks; slot, first row of t and number of rows of each; then the row of x and y for each row of t; all uint32_t.
#pragma once

#include <stdint.h>

namespace quire {

// The factors of one linear layer in a slot, `slot_bytes` behind those of the slot before. Behind the header come its parts, and at
// the offsets (bytes from the header, multiples of 64) scales and panels.
struct LowRankHeader {
    uint32_t panels;  // of 16 ranks, those of all A of the layer stacked; 0: the slot adds nothing to this layer
    uint32_t parts;   // number of LowRankParts
    uint32_t scales;  // offset of float [16 * panels]: factors of t
    uint32_t down;    // offset of A: T [panels, inputs, 16]
};
static_assert(sizeof(LowRankHeader) == 16, "no hidden padding");

// The rows of B for consecutive outputs.
struct LowRankPart {
    uint32_t first_output;
    uint32_t outputs;
    uint32_t first_rank;
    uint32_t ranks;
    uint32_t up;  // offset of B: T [ceil(outputs / 16), ranks, 16]
    uint32_t reserved[3];  // 0
};
static_assert(sizeof(LowRankPart) == 32, "no hidden padding");

struct LowRankShape {
    int64_t slot_bytes;
    uint32_t inputs;
    uint32_t outputs;
    uint32_t width;  // floats of a row of t, at least 16 * panels of each slot
    uint32_t reserved;  // 0
};
static_assert(sizeof(LowRankShape) == 24, "no hidden padding");

}  // namespace quire
