// Tensor core tiles, the loads that feed them, and asynchronous copies.
#include <quire/export.cuh>
#include <quire/ptx.cuh>

// c[16, 8] = a[16, k] b[8, k]^T, for a k that is a multiple of 16: copied, loaded and multiplied tile by tile, with two copies
// pending. b has `rows` rows; the rest are zeros.
template <class T>
__device__ __forceinline__ void product(float* c, const T* a, const T* b, int k, int rows) {
    constexpr int ROW = 24;  // padded, so that the rows of a tile lie in different banks
    extern __shared__ __align__(16) unsigned char smem[];
    T* tiles = reinterpret_cast<T*>(smem);
    const int lane = static_cast<int>(threadIdx.x), row = lane / 2, part = lane % 2 * 8;
    const auto begin = [&](int from) {
        T* stage = tiles + from / 16 % 2 * 24 * ROW;
        if (from < k) {
            quire::cp_async16(stage + row * ROW + part, a + row * k + from + part);
            if (lane < 16) quire::cp_async16(stage + (16 + row) * ROW + part, b + row * k + from + part, row < rows);
        }
        quire::cp_async_commit();
    };
    float d[4] = {};
    begin(0);
    for (int from = 0; from < k; from += 16) {
        begin(from + 16);
        quire::cp_async_wait<1>();
        __syncwarp();
        const T* stage = tiles + from / 16 % 2 * 24 * ROW;
        uint32_t of_a[4], of_b[2];
        quire::ldmatrix(of_a, stage + (lane % 16) * ROW + lane / 16 * 8);
        quire::ldmatrix(of_b, stage + (16 + lane % 8) * ROW + lane / 8 % 2 * 8);
        quire::mma_m16n8k16<T>(d, of_a, of_b);
        __syncwarp();
    }
    const int g = lane / 4, column = lane % 4 * 2;
    for (int i = 0; i < 4; i++) c[(g + i / 2 * 8) * 8 + column + i % 2] = d[i];
}
extern "C" __global__ void product_f16(float* c, const __half* a, const __half* b, int k, int rows) {
    product(c, a, b, k, rows);
}
QUIRE_EXPORT(product_f16);
extern "C" __global__ void product_bf16(float* c, const __nv_bfloat16* a, const __nv_bfloat16* b, int k,
                                        int rows) {
    product(c, a, b, k, rows);
}
QUIRE_EXPORT(product_bf16);

// Four tiles of 8x8 numbers, loaded in each way; 14 registers per lane.
__device__ __forceinline__ void load_each_way(uint32_t* out, const uint16_t* in) {
    extern __shared__ __align__(16) unsigned char smem[];
    uint16_t* tiles = reinterpret_cast<uint16_t*>(smem);
    for (int i = static_cast<int>(threadIdx.x); i < 256; i += 32) tiles[i] = in[i];
    __syncwarp();
    const uint16_t* row = tiles + threadIdx.x * 8;
    uint32_t one[1], two[2], four[4], one_t[1], two_t[2], four_t[4];
    quire::ldmatrix(one, row);
    quire::ldmatrix(two, row);
    quire::ldmatrix(four, row);
    quire::ldmatrix_trans(one_t, row);
    quire::ldmatrix_trans(two_t, row);
    quire::ldmatrix_trans(four_t, row);
    uint32_t* mine = out + 14 * threadIdx.x;
    mine[0] = one[0];
    for (int i = 0; i < 2; i++) mine[1 + i] = two[i];
    for (int i = 0; i < 4; i++) mine[3 + i] = four[i];
    mine[7] = one_t[0];
    for (int i = 0; i < 2; i++) mine[8 + i] = two_t[i];
    for (int i = 0; i < 4; i++) mine[10 + i] = four_t[i];
}
extern "C" __global__ void loads(uint32_t* out, const uint16_t* in) { load_each_way(out, in); }
QUIRE_EXPORT(loads);
