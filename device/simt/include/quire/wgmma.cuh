// Products of a warpgroup on Hopper's tensor cores: wgmma, of sm_90a.
//
// A warpgroup is four whole warps, the first of which is a multiple of four. It starts products, commits them as a group, and
// waits for groups. Between start and wait, the sums, the registers of a, and the operands in shared memory must not be
// accessed. Names in brackets are sections of the PTX ISA.
#pragma once

#include "async.cuh"

namespace quire {

// Returns the descriptor of a matrix of 16-bit elements in shared memory [Asynchronous warpgroup level matrix: matrix
// descriptor] with the 128-byte swizzle: rows of 64 elements (128 bytes); the 16-byte chunk c of row r of a group of 8 rows is
// stored at c ^ (r % 8); groups of 8 rows start at multiples of 1024 bytes. load_box stores boxes with 64 elements per row this
// way.
//
// The product decides whether the rows are those of the matrix or of its transpose. `leading`: bytes from one group of 64
// columns to the next, if elements of a row are columns (MN major); otherwise unused. `stride`: bytes from one group of 8 rows
// to the next.
__device__ __forceinline__ uint64_t matrix_in_128(const void* shared, uint32_t leading, uint32_t stride,
                                                  [[maybe_unused]] Place at = here()) {
#ifdef QUIRE_SIMT
    const uint64_t address = simt::shared_offset(shared, at);
#else
    const uint64_t address = shared_address(shared);
#endif
    return (address & 0x3ffff) >> 4 | static_cast<uint64_t>(leading >> 4) << 16 | static_cast<uint64_t>(stride >> 4) << 32 |
           uint64_t{1} << 62;
}

// Returns the descriptor of the matrix `bytes` bytes further on: within the 128 bytes of a row, or by groups of 8 rows.
__device__ __forceinline__ uint64_t matrix_from(uint64_t matrix, uint32_t bytes) { return matrix + (bytes >> 4); }

// Returns the address of the 16-byte chunk `chunk` (0 to 7) of row `row` of such rows.
__device__ __forceinline__ unsigned char* chunk_in_128(void* rows, uint32_t row, uint32_t chunk) {
    return static_cast<unsigned char*>(rows) + row * 128 + ((chunk ^ row % 8) * 16);
}

#ifndef QUIRE_SIMT
#define QUIRE_WGMMA_4(d, i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])

// Keeps the order of accesses to registers of a product and of the fences and waits around it. The compiler knows that a product
// changes its sums, but not that it does so until the wait.
template <int N>
__device__ __forceinline__ void wgmma_bind(float (&d)[N][4]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : QUIRE_WGMMA_4(d, i)::"memory");
}
template <int N>
__device__ __forceinline__ void wgmma_bind(uint32_t (&a)[N][4]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+r"(a[i][0]), "+r"(a[i][1]), "+r"(a[i][2]), "+r"(a[i][3])::"memory");
}
#endif

// Required before the first product, and before a product that follows an ordinary access to its registers [wgmma.fence]:
// the sums, and a if it is in registers.
template <class... Registers>
__device__ __forceinline__ void wgmma_fence([[maybe_unused]] Registers&... registers) {
#ifdef QUIRE_SIMT
    simt::product_fence();
#else
    (wgmma_bind(registers), ...);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}

// Closes the open group of products [wgmma.commit_group].
__device__ __forceinline__ void wgmma_commit() {
#ifdef QUIRE_SIMT
    simt::product_commit();
#else
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}

// Waits until at most the N newest groups are incomplete [wgmma.wait_group]. Then the sums `d` of the others can be read.
template <int N, int M>
__device__ __forceinline__ void wgmma_wait([[maybe_unused]] float (&d)[M][4], [[maybe_unused]] Place at = here()) {
#ifdef QUIRE_SIMT
    simt::wgmma_wait(N, at);
#else
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
    wgmma_bind(d);
#endif
}

// In these overloads the registers `a` of the products can be written afterwards too. The last one leaves the sums to a later wait.
template <int N, int M, int K>
__device__ __forceinline__ void wgmma_wait(float (&d)[M][4], [[maybe_unused]] uint32_t (&a)[K][4], Place at = here()) {
    wgmma_wait<N>(d, at);
#ifndef QUIRE_SIMT
    wgmma_bind(a);
#endif
}
template <int N, int K>
__device__ __forceinline__ void wgmma_wait([[maybe_unused]] uint32_t (&a)[K][4], [[maybe_unused]] Place at = here()) {
#ifdef QUIRE_SIMT
    simt::wgmma_wait(N, at);
#else
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
    wgmma_bind(a);
#endif
}

// Layout of the second factor in shared memory: a row of k for each column, or a row of columns for each k.
enum class Rows { K, COLUMNS };

#ifndef QUIRE_SIMT
#define QUIRE_WGMMA_8(d, i) QUIRE_WGMMA_4(d, i), QUIRE_WGMMA_4(d, i + 1)
#define QUIRE_WGMMA_16(d, i) QUIRE_WGMMA_8(d, i), QUIRE_WGMMA_8(d, i + 2)
#define QUIRE_WGMMA_32(d, i) QUIRE_WGMMA_16(d, i), QUIRE_WGMMA_16(d, i + 4)
#define QUIRE_WGMMA_64(d, i) QUIRE_WGMMA_32(d, i), QUIRE_WGMMA_32(d, i + 8)
#define QUIRE_WGMMA_128(d, i) QUIRE_WGMMA_64(d, i), QUIRE_WGMMA_64(d, i + 16)
#define QUIRE_WGMMA_8_NAMES "%0,%1,%2,%3,%4,%5,%6,%7"
#define QUIRE_WGMMA_16_NAMES QUIRE_WGMMA_8_NAMES ",%8,%9,%10,%11,%12,%13,%14,%15"
#define QUIRE_WGMMA_32_NAMES QUIRE_WGMMA_16_NAMES ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define QUIRE_WGMMA_64_NAMES                                                        \
    QUIRE_WGMMA_32_NAMES                                                            \
    ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"             \
    "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define QUIRE_WGMMA_128_NAMES                                                                           \
    QUIRE_WGMMA_64_NAMES                                                                                \
    ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,"                                 \
    "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,"                                  \
    "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,"                      \
    "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
// The instruction m64 n k16: the sums of a thread, a predicate from operand `p` (whether to add to the sums), then the factors.
#define QUIRE_WGMMA_TYPED(sums, n, type, p, factors, ...)                                                         \
    asm volatile("{.reg .pred p; setp.ne.b32 p, " p ", 0; wgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." \
                 type " {" QUIRE_WGMMA_##sums##_NAMES "}, " factors ";}"                                           \
                 : QUIRE_WGMMA_##sums(d, 0)                                                                        \
                 : __VA_ARGS__)
#define QUIRE_WGMMA(sums, n, p, factors, ...)                                                                          \
    if constexpr (std::is_same_v<T, __half>) QUIRE_WGMMA_TYPED(sums, n, "f16", p, factors, __VA_ARGS__);                \
    else QUIRE_WGMMA_TYPED(sums, n, "bf16", p, factors, __VA_ARGS__)
#endif

// Computes d = a b, or d += a b if `accumulate`, for a of 64 x 16, b of 16 x N, and d of 64 x N floats. T, the type of a and b,
// is __half or __nv_bfloat16 [wgmma.mma_async]. With g = lane / 4 and c = lane % 4 * 2, a lane of warp w of the warpgroup holds
// these elements of d, for every i < N / 8:
//
//   d[i][0], d[i][1]  row 16 w + g,      columns 8 i + c and the next
//   d[i][2], d[i][3]  row 16 w + g + 8,  the same columns
//
// In this overload a is in shared memory, with rows of k.
template <class T, int N, Rows B>
__device__ __forceinline__ void wgmma(float (&d)[N / 8][4], uint64_t a, uint64_t b, bool accumulate,
                                      [[maybe_unused]] Place at = here()) {
    static_assert(std::is_same_v<T, __half> || std::is_same_v<T, __nv_bfloat16>, "tiles are f16 or bf16");
    static_assert(N == 64 || N == 128, "wgmma with a in shared memory is wrapped for 64 and 128 columns");
#ifdef QUIRE_SIMT
    simt::wgmma<T, N, B == Rows::COLUMNS>(&d[0][0], nullptr, a, b, accumulate, at);
#else
    constexpr int TRANSPOSED = B == Rows::COLUMNS;
    const int add = accumulate;
#define QUIRE_WGMMA_FACTORS "l"(a), "l"(b), "r"(add), "n"(TRANSPOSED)
    if constexpr (N == 64) {
        QUIRE_WGMMA(32, "64", "%34", "%32, %33, p, 1, 1, 0, %35", QUIRE_WGMMA_FACTORS);
    } else {
        QUIRE_WGMMA(64, "128", "%66", "%64, %65, p, 1, 1, 0, %67", QUIRE_WGMMA_FACTORS);
    }
#undef QUIRE_WGMMA_FACTORS
#endif
}

// In this overload each warp passes 16 rows of a in registers, laid out as for mma_m16n8k16; two neighbouring d[i] of a
// product, converted to T, have that layout. The registers must not change until the wait.
template <class T, int N, Rows B>
__device__ __forceinline__ void wgmma(float (&d)[N / 8][4], const uint32_t (&a)[4], uint64_t b, bool accumulate,
                                      [[maybe_unused]] Place at = here()) {
    static_assert(std::is_same_v<T, __half> || std::is_same_v<T, __nv_bfloat16>, "tiles are f16 or bf16");
    static_assert(N == 16 || N == 32 || N == 64 || N == 128 || N == 256, "wgmma is wrapped for 16 to 256 columns");
#ifdef QUIRE_SIMT
    simt::wgmma<T, N, B == Rows::COLUMNS>(&d[0][0], a, 0, b, accumulate, at);
#else
    constexpr int TRANSPOSED = B == Rows::COLUMNS;
    const int add = accumulate;
#define QUIRE_WGMMA_FACTORS "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(TRANSPOSED)
    if constexpr (N == 16) {
        QUIRE_WGMMA(8, "16", "%13", "{%8, %9, %10, %11}, %12, p, 1, 1, %14", QUIRE_WGMMA_FACTORS);
    } else if constexpr (N == 32) {
        QUIRE_WGMMA(16, "32", "%21", "{%16, %17, %18, %19}, %20, p, 1, 1, %22", QUIRE_WGMMA_FACTORS);
    } else if constexpr (N == 64) {
        QUIRE_WGMMA(32, "64", "%37", "{%32, %33, %34, %35}, %36, p, 1, 1, %38", QUIRE_WGMMA_FACTORS);
    } else if constexpr (N == 128) {
        QUIRE_WGMMA(64, "128", "%69", "{%64, %65, %66, %67}, %68, p, 1, 1, %70", QUIRE_WGMMA_FACTORS);
    } else {
        QUIRE_WGMMA(128, "256", "%133", "{%128, %129, %130, %131}, %132, p, 1, 1, %134", QUIRE_WGMMA_FACTORS);
    }
#undef QUIRE_WGMMA_FACTORS
#endif
}

}  // namespace quire
