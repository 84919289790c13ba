// Mbarriers, the copy engine, named barriers and the products of a warpgroup.
#include <quire/export.cuh>
#include <quire/wgmma.cuh>

using quire::TensorMap;

__device__ __forceinline__ unsigned char* matrix_memory() {
    extern __shared__ __align__(1024) unsigned char smem[];
    return smem;
}

// Makes an mbarrier after `bytes` bytes of shared memory, for one arrival per phase.
__device__ __forceinline__ uint64_t* make_barrier(unsigned bytes, unsigned arrivals) {
    uint64_t* barrier = reinterpret_cast<uint64_t*>(matrix_memory() + bytes);
    if (threadIdx.x == 0) {
        quire::mbarrier_init(barrier, arrivals);
        quire::mbarrier_init_fence();
    }
    __syncthreads();
    return barrier;
}

// Writes one box as it is stored in shared memory.
extern "C" __global__ void box(uint32_t* out, const __grid_constant__ TensorMap map, int x, int y, int z, int w, unsigned bytes) {
    uint64_t* barrier = make_barrier(bytes, 1);
    if (threadIdx.x == 0) {
        quire::mbarrier_arrive_expect(barrier, bytes);
        quire::load_box(matrix_memory(), map, x, y, z, w, barrier);
    }
    quire::mbarrier_wait(barrier, 0);
    for (unsigned i = threadIdx.x; i < bytes / 4; i += blockDim.x) out[i] = reinterpret_cast<uint32_t*>(matrix_memory())[i];
}
QUIRE_EXPORT(box);

// Boxes of 8 rows through two stages: one warp loads them, two others sum them, each one half of the words of a row.
extern "C" __global__ void pipeline(uint32_t* sums, const __grid_constant__ TensorMap map, int boxes) {
    constexpr int BYTES = 1024, STAGES = 2;
    uint64_t* full = reinterpret_cast<uint64_t*>(matrix_memory() + STAGES * BYTES);
    uint64_t* free = full + STAGES;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            quire::mbarrier_init(&full[i], 1);
            quire::mbarrier_init(&free[i], 2);
        }
        quire::mbarrier_init_fence();
    }
    __syncthreads();
    uint32_t sum = 0;
    for (int n = 0; n < boxes; n++) {
        const int stage = n % STAGES;
        const uint32_t parity = n / STAGES % 2;
        unsigned char* at = matrix_memory() + stage * BYTES;
        if (threadIdx.x < 32) {
            quire::mbarrier_wait(&free[stage], parity ^ 1);
            if (threadIdx.x == 0) {
                quire::mbarrier_arrive_expect(&full[stage], BYTES);
                quire::load_box(at, map, 0, n * 8, 0, 0, &full[stage]);
            }
        } else {
            quire::mbarrier_wait(&full[stage], parity);
            for (int i = static_cast<int>(threadIdx.x) - 32; i < BYTES / 4; i += 64) sum += reinterpret_cast<uint32_t*>(at)[i];
            __syncwarp();
            if (threadIdx.x % 32 == 0) quire::mbarrier_arrive(&free[stage]);
        }
    }
    if (threadIdx.x >= 32) atomicAdd(sums, sum);
}
QUIRE_EXPORT(pipeline);

// Warps 0 and 1 wait at barrier 1; warp 2 arrives at barrier 2, where warp 3 waits; each thread reads a number of the other
// warp.
extern "C" __global__ void named_barriers(int* out) {
    __shared__ int left[128];
    const unsigned warp = threadIdx.x / 32;
    left[threadIdx.x] = static_cast<int>(threadIdx.x);
    if (warp < 2) quire::named_barrier_sync(1, 64);
    else if (warp == 2) quire::named_barrier_arrive(2, 64);
    else quire::named_barrier_sync(2, 64);
    if (warp != 2) out[threadIdx.x] = left[threadIdx.x ^ 32];
}
QUIRE_EXPORT(named_barriers);

// Stores bytes to shared memory for the tensor cores.
__device__ __forceinline__ void fill_shared(const uint4* image, unsigned bytes) {
    for (unsigned i = threadIdx.x; i < bytes / 16; i += blockDim.x) quire::proxy_store(matrix_memory() + 16 * i, image[i]);
    quire::proxy_fence();
    __syncthreads();
}

template <int N>
__device__ __forceinline__ void store_sums(float* c, const float (&d)[N / 8][4]) {
    const unsigned row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
    for (unsigned i = 0; i < N / 8; i++) {
        for (unsigned j = 0; j < 4; j++) c[(row + j / 2 * 8) * N + i * 8 + column + j % 2] = d[i][j];
    }
}

// c[64, 64] = a[64, 16] b[16, 64], both given as an image of shared memory, a at its start and b after it; the descriptors are
// complete except for the address.
template <quire::Rows ROWS>
__device__ __forceinline__ void product_of_image(float* c, const uint4* image, unsigned bytes, uint64_t a, uint64_t b, unsigned b_at) {
    fill_shared(image, bytes);
    const uint64_t start = quire::matrix_in_128(matrix_memory(), 0, 0) & 0x3fff;
    float d[8][4];
    quire::wgmma_fence(d);
    quire::wgmma<__half, 64, ROWS>(d, a + start, b + start + b_at / 16, false);
    quire::wgmma_commit();
    quire::wgmma_wait<0>(d);
    store_sums<64>(c, d);
}
extern "C" __global__ void product_of_image_k(float* c, const uint4* image, unsigned bytes, uint64_t a, uint64_t b, unsigned b_at) {
    product_of_image<quire::Rows::K>(c, image, bytes, a, b, b_at);
}
QUIRE_EXPORT(product_of_image_k);
extern "C" __global__ void product_of_image_columns(float* c, const uint4* image, unsigned bytes, uint64_t a, uint64_t b,
                                                    unsigned b_at) {
    product_of_image<quire::Rows::COLUMNS>(c, image, bytes, a, b, b_at);
}
QUIRE_EXPORT(product_of_image_columns);

// c[64, N] += a[64, 64] b[64, N], both loaded as boxes; a optionally through registers. Two groups are pending at once, and
// the sums of the first are read while the second is pending.
template <class T, int N, quire::Rows ROWS, bool REGISTERS>
__device__ __forceinline__ void product_of_boxes(float* c, const TensorMap& of_a, const TensorMap& of_b, const T* a_again) {
    constexpr unsigned A = 64 * 128, B = N * 128, PANELS = ROWS == quire::Rows::K ? 1 : N / 64;
    unsigned char *a = matrix_memory(), *b = a + A;
    uint64_t* barrier = make_barrier(A + B, 1);
    if (threadIdx.x == 0) {
        quire::mbarrier_arrive_expect(barrier, A + B);
        quire::load_box(a, of_a, 0, 0, 0, 0, barrier);
        for (unsigned p = 0; p < PANELS; p++) quire::load_box(b + p * 64 * 128, of_b, static_cast<int>(p) * 64, 0, 0, 0, barrier);
    }
    quire::mbarrier_wait(barrier, 0);
    const uint64_t a_matrix = quire::matrix_in_128(a, 16, 1024), b_matrix = quire::matrix_in_128(b, 64 * 128, 1024);
    const unsigned row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
    uint32_t registers[4][4];
    for (unsigned k = 0; k < 4; k++) {
        for (unsigned i = 0; i < 4; i++) {
            registers[k][i] = *reinterpret_cast<const uint32_t*>(a_again + (row + i % 2 * 8) * 64 + k * 16 + i / 2 * 8 + column);
        }
    }
    float d[2][N / 8][4];
    for (unsigned i = 0; i < N / 8; i++) {
        for (unsigned j = 0; j < 4; j++) d[0][i][j] = d[1][i][j] = c[(row + j / 2 * 8) * N + i * 8 + column + j % 2];
    }
    quire::wgmma_fence(d[0], d[1], registers);
#pragma unroll
    for (unsigned both = 0; both < 2; both++) {
#pragma unroll
        for (unsigned k = 0; k < 4; k++) {
            const uint64_t from = quire::matrix_from(b_matrix, ROWS == quire::Rows::K ? k * 32 : k * 16 * 128);
            if constexpr (REGISTERS) quire::wgmma<T, N, ROWS>(d[both], registers[k], from, true);
            else quire::wgmma<T, N, ROWS>(d[both], quire::matrix_from(a_matrix, k * 32), from, true);
        }
        quire::wgmma_commit();
    }
    quire::wgmma_wait<1>(d[0]);
    store_sums<N>(c, d[0]);
    quire::wgmma_wait<0>(d[1]);
    store_sums<N>(c + 64 * N, d[1]);
}

#define PRODUCT_OF_BOXES(name, T, N, ROWS, REGISTERS)                                                                  \
    extern "C" __global__ void name(float* c, const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, \
                                    const T* a_again) {                                                                \
        product_of_boxes<T, N, quire::Rows::ROWS, REGISTERS>(c, a, b, a_again);                                        \
    }                                                                                                                  \
    QUIRE_EXPORT(name);

PRODUCT_OF_BOXES(boxes_f16_64_k, __half, 64, K, false)
PRODUCT_OF_BOXES(boxes_bf16_64_columns_registers, __nv_bfloat16, 64, COLUMNS, true)
PRODUCT_OF_BOXES(boxes_bf16_128_k, __nv_bfloat16, 128, K, false)
PRODUCT_OF_BOXES(boxes_f16_128_columns_registers, __half, 128, COLUMNS, true)
PRODUCT_OF_BOXES(boxes_f16_128_k_registers, __half, 128, K, true)
PRODUCT_OF_BOXES(boxes_bf16_64_columns, __nv_bfloat16, 64, COLUMNS, false)
