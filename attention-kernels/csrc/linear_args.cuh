// Arguments of the linear kernels: pointers as separate parameters, then the shape by value (src/cuda/parameters.rs).
//
// Weights are either row-major numbers [n, k] of T, or panels of 16 outputs (linear/src/tiles.rs). Those of experts lie one
// behind the other.
#pragma once

#include <stdint.h>

namespace quire {

// Type of scales.
enum LinearScale : uint32_t { SCALE_F32, SCALE_F16, SCALE_BF16 };

// What a group has beside its scale.
enum LinearOffset : uint32_t {
    OFFSET_NONE,
    OFFSET_ZERO,     // a byte: subtracted from codes
    OFFSET_MINIMUM,  // a float: added to weights
};

struct LinearShape {
    int64_t panel_bytes;   // from one panel to the next; 0: weights are numbers
    uint32_t rows;         // of x and y; with experts, those of y
    uint32_t n;            // outputs, of one expert
    uint32_t k;            // inputs
    uint32_t y_stride;     // elements from one row of y to the next
    uint32_t y_is_float;   // whether y is float instead of T
    uint32_t scales;       // byte of a panel at which its scales begin: [groups, 16]
    uint32_t offsets;      // the same for what a LinearOffset names: [groups, 16]
    uint32_t groups;       // of a row
    uint32_t group_shift;  // input i is in group i >> group_shift
    uint32_t scale_type;   // a LinearScale
    uint32_t offset_type;  // a LinearOffset
    uint32_t zero;         // subtracted from all codes that are integers
    uint32_t experts;      // 0: none, and neither order nor starts
    uint32_t top_k;        // assignments per row of x; 1: x has a row per assignment
};
static_assert(sizeof(LinearShape) == 64, "no hidden padding");

// Rows that become bytes.
struct RoundShape {
    uint32_t k;       // elements of a row, a multiple of 16
    uint32_t format;  // KV_E4M3 or KV_INT8
    float scale;      // of all rows; 0: each row has its own
    uint32_t reserved;
};
static_assert(sizeof(RoundShape) == 16, "no hidden padding");

// Sums of products of bytes that become numbers.
struct ScaleShape {
    uint32_t rows;
    uint32_t n;           // outputs, a multiple of 16
    uint32_t format;      // KV_E4M3: sums are float; KV_INT8: they are int32
    uint32_t y_is_float;  // whether y and bias are float instead of T
};
static_assert(sizeof(ScaleShape) == 16, "no hidden padding");

// Sums of slices of k that are added.
struct SliceShape {
    uint32_t rows;
    uint32_t n;           // outputs, a multiple of 4
    uint32_t slices;      // at least 1
    uint32_t y_is_float;  // whether y and bias are float instead of T
};
static_assert(sizeof(SliceShape) == 16, "no hidden padding");

}  // namespace quire
