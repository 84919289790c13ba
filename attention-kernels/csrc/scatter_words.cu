// Writes the changed words of the arrays of a step to where they belong (src/upload.rs). Kernel scatter_words.
//
// Grid (pieces / 4 rounded up), 128 threads: a warp copies a piece. Pieces that overlap have the same words.

#include <quire/export.cuh>

#include <stdint.h>

namespace quire {

// A range of consecutive words of an array.
struct Piece {
    uint32_t array;  // number of the parameter
    uint32_t at;     // first word in the array
    uint32_t words;
    uint32_t from;   // first word in `packed`
};
static_assert(sizeof(Piece) == 16, "as in src/upload.rs");

constexpr uint32_t SCATTER_THREADS = 128;

}  // namespace quire

// `packed`: `words` words, then `pieces` pieces.
extern "C" __global__ void __launch_bounds__(quire::SCATTER_THREADS)
    scatter_words(const uint32_t* packed, uint32_t words, uint32_t pieces,
                  uint32_t* a0, uint32_t* a1, uint32_t* a2, uint32_t* a3, uint32_t* a4, uint32_t* a5, uint32_t* a6,
                  uint32_t* a7, uint32_t* a8, uint32_t* a9, uint32_t* a10, uint32_t* a11, uint32_t* a12, uint32_t* a13,
                  uint32_t* a14, uint32_t* a15, uint32_t* a16, uint32_t* a17, uint32_t* a18, uint32_t* a19, uint32_t* a20,
                  uint32_t* a21, uint32_t* a22, uint32_t* a23, uint32_t* a24, uint32_t* a25, uint32_t* a26, uint32_t* a27) {
    quire::wait_for_launches();
    const uint32_t index = blockIdx.x * (quire::SCATTER_THREADS / 32) + threadIdx.x / 32;
    if (index >= pieces) return;
    const quire::Piece piece = reinterpret_cast<const quire::Piece*>(packed + words)[index];
    uint32_t* array = a0;
    switch (piece.array) {
        case 1: array = a1; break;
        case 2: array = a2; break;
        case 3: array = a3; break;
        case 4: array = a4; break;
        case 5: array = a5; break;
        case 6: array = a6; break;
        case 7: array = a7; break;
        case 8: array = a8; break;
        case 9: array = a9; break;
        case 10: array = a10; break;
        case 11: array = a11; break;
        case 12: array = a12; break;
        case 13: array = a13; break;
        case 14: array = a14; break;
        case 15: array = a15; break;
        case 16: array = a16; break;
        case 17: array = a17; break;
        case 18: array = a18; break;
        case 19: array = a19; break;
        case 20: array = a20; break;
        case 21: array = a21; break;
        case 22: array = a22; break;
        case 23: array = a23; break;
        case 24: array = a24; break;
        case 25: array = a25; break;
        case 26: array = a26; break;
        case 27: array = a27; break;
    }
    for (uint32_t i = threadIdx.x % 32; i < piece.words; i += 32) array[piece.at + i] = packed[piece.from + i];
}
QUIRE_EXPORT_OVERLAPPED(scatter_words, 0);
