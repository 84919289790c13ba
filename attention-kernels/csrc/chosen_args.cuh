// Arguments of the indexer's kernels that follow those of attention. IndexShape has the same layout in nvcc, g++ and Rust.
#pragma once

#include <stdint.h>

namespace quire {

struct IndexShape {
    uint32_t heads;      // of the indexer
    uint32_t dim;        // elements of its queries and keys
    uint32_t first;      // element of a row of the cache with which its key begins
    uint32_t most;       // tokens that are chosen for a row; [rows, most] is what `chosen` has
    uint32_t stride;     // of the scores of a row
    uint32_t first_row;  // of the pass, in the launch; the scores begin with it
};
static_assert(sizeof(IndexShape) == 24, "no hidden padding");

}  // namespace quire
