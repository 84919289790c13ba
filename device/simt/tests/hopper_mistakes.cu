// Kernels that misuse Hopper's asynchronous operations. A comment `// here: <name>` marks the line that the report must name;
// the errors without a mark show in the result.
#include <quire/export.cuh>
#include <quire/wgmma.cuh>

using quire::TensorMap;

constexpr unsigned BOX = 1024;

struct OneBox {
    unsigned char* shared;
    uint64_t* barrier;
};

__device__ __forceinline__ OneBox make_block(bool fence = true) {
    extern __shared__ __align__(1024) unsigned char smem[];
    uint64_t* barrier = reinterpret_cast<uint64_t*>(smem + 2 * BOX);
    if (threadIdx.x == 0) {
        quire::mbarrier_init(barrier, 1);
        if (fence) quire::mbarrier_init_fence();
    }
    __syncthreads();
    return {smem, barrier};
}

__device__ __forceinline__ void begin(const OneBox& block, const TensorMap& map, unsigned bytes = BOX) {
    if (threadIdx.x == 0) {
        quire::mbarrier_arrive_expect(block.barrier, bytes);
        quire::load_box(block.shared, map, 0, 0, 0, 0, block.barrier);
    }
}

__device__ __forceinline__ float word(const OneBox& block) { return reinterpret_cast<const float*>(block.shared)[threadIdx.x % 256]; }

// Stores zeros for a matrix of 64 rows of 16, at the start of 128-byte rows.
__device__ __forceinline__ uint64_t zeros(bool fence = true) {
    extern __shared__ __align__(1024) unsigned char smem[];
    for (unsigned i = threadIdx.x; i < 512; i += 128) quire::proxy_store(smem + 16 * i, make_uint4(0, 0, 0, 0));
    if (fence) quire::proxy_fence();
    __syncthreads();
    return quire::matrix_in_128(smem, 16, 1024);
}

extern "C" __global__ void read_before_arrival(float* out, const __grid_constant__ TensorMap map) {
    const OneBox block = make_block();
    begin(block, map);
    __syncthreads();
    out[threadIdx.x] = word(block);
    __syncthreads();
    quire::mbarrier_wait(block.barrier, 0);
}
QUIRE_EXPORT(read_before_arrival);

extern "C" __global__ void wrong_parity(float* out, const __grid_constant__ TensorMap map) {
    const OneBox block = make_block();
    begin(block, map);
    __syncthreads();
    quire::mbarrier_wait(block.barrier, 1);
    out[threadIdx.x] = word(block);
    __syncthreads();
    quire::mbarrier_wait(block.barrier, 0);
}
QUIRE_EXPORT(wrong_parity);

// The second box is loaded before the other threads have read the first.
extern "C" __global__ void refilled_too_early(float* out, const __grid_constant__ TensorMap map) {
    const OneBox block = make_block();
    begin(block, map);
    if (threadIdx.x == 0) {
        quire::mbarrier_wait(block.barrier, 0);
        quire::load_box(block.shared, map, 0, 0, 0, 0, block.barrier);
        quire::mbarrier_arrive_expect(block.barrier, BOX);
    }
    __syncthreads();
    out[threadIdx.x] = word(block);
    __syncthreads();
    quire::mbarrier_wait(block.barrier, 1);
}
QUIRE_EXPORT(refilled_too_early);

extern "C" __global__ void left_in_flight(float*, const __grid_constant__ TensorMap map) {
    const OneBox block = make_block();
    if (threadIdx.x == 0) quire::load_box(block.shared, map, 0, 0, 0, 0, block.barrier);
}
QUIRE_EXPORT(left_in_flight);

extern "C" __global__ void too_few_bytes(float*, const __grid_constant__ TensorMap map) {
    const OneBox block = make_block();
    begin(block, map, BOX / 2);
    quire::mbarrier_wait(block.barrier, 0);  // here: too_few_bytes
}
QUIRE_EXPORT(too_few_bytes);

extern "C" __global__ void nobody_arrives(float*, const __grid_constant__ TensorMap) {
    const OneBox block = make_block();
    quire::mbarrier_wait(block.barrier, 0);  // here: nobody_arrives
}
QUIRE_EXPORT(nobody_arrives);

extern "C" __global__ void arrives_twice(float*, const __grid_constant__ TensorMap map) {
    const OneBox block = make_block();
    if (threadIdx.x == 0) {
        quire::mbarrier_arrive_expect(block.barrier, BOX);
        quire::mbarrier_arrive(block.barrier);  // here: arrives_twice
        quire::load_box(block.shared, map, 0, 0, 0, 0, block.barrier);
    }
}
QUIRE_EXPORT(arrives_twice);

extern "C" __global__ void no_mbarrier(float*, const __grid_constant__ TensorMap) {
    extern __shared__ __align__(1024) unsigned char smem[];
    quire::mbarrier_arrive(reinterpret_cast<uint64_t*>(smem));  // here: no_mbarrier
}
QUIRE_EXPORT(no_mbarrier);

extern "C" __global__ void no_init_fence(float*, const __grid_constant__ TensorMap map) {
    const OneBox block = make_block(false);
    if (threadIdx.x == 0) quire::load_box(block.shared, map, 0, 0, 0, 0, block.barrier);  // here: no_init_fence
}
QUIRE_EXPORT(no_init_fence);

extern "C" __global__ void misaligned_box(float*, const __grid_constant__ TensorMap map) {
    const OneBox block = make_block();
    if (threadIdx.x == 0) quire::load_box(block.shared + 64, map, 0, 0, 0, 0, block.barrier);  // here: misaligned_box
}
QUIRE_EXPORT(misaligned_box);

extern "C" __global__ void counts_differ(float*, const __grid_constant__ TensorMap) {
    if (threadIdx.x < 64) quire::named_barrier_sync(1, 128);  // here: counts_differ
    else quire::named_barrier_sync(1, 96);  // here: counts_differ
}
QUIRE_EXPORT(counts_differ);

extern "C" __global__ void too_few_meet(float*, const __grid_constant__ TensorMap) {
    if (threadIdx.x < 64) quire::named_barrier_sync(1, 96);  // here: too_few_meet
}
QUIRE_EXPORT(too_few_meet);

extern "C" __global__ void no_proxy_fence(float* out, const __grid_constant__ TensorMap) {
    const uint64_t matrix = zeros(false);
    float d[8][4];
    quire::wgmma_fence(d);
    quire::wgmma<__half, 64, quire::Rows::K>(d, matrix, matrix, false);
    quire::wgmma_commit();
    quire::wgmma_wait<0>(d);
    out[threadIdx.x] = d[0][0];
}
QUIRE_EXPORT(no_proxy_fence);

extern "C" __global__ void sums_too_early(float* out, const __grid_constant__ TensorMap) {
    const uint64_t matrix = zeros();
    float d[8][4];
    quire::wgmma_fence(d);
    quire::wgmma<__half, 64, quire::Rows::K>(d, matrix, matrix, false);
    quire::wgmma_commit();
    quire::wgmma_wait<1>(d);
    out[threadIdx.x] = d[0][0];
    quire::wgmma_wait<0>(d);
}
QUIRE_EXPORT(sums_too_early);

extern "C" __global__ void no_wgmma_fence(float* out, const __grid_constant__ TensorMap) {
    const uint64_t matrix = zeros();
    float d[8][4];
    quire::wgmma<__half, 64, quire::Rows::K>(d, matrix, matrix, false);  // here: no_wgmma_fence
    quire::wgmma_commit();
    quire::wgmma_wait<0>(d);
    out[threadIdx.x] = d[0][0];
}
QUIRE_EXPORT(no_wgmma_fence);

extern "C" __global__ void no_wgmma_wait(float*, const __grid_constant__ TensorMap) {
    const uint64_t matrix = zeros();
    float d[8][4];
    quire::wgmma_fence(d);
    quire::wgmma<__half, 64, quire::Rows::K>(d, matrix, matrix, false);  // here: no_wgmma_wait
    quire::wgmma_commit();
}
QUIRE_EXPORT(no_wgmma_wait);

extern "C" __global__ void written_sums(float*, const __grid_constant__ TensorMap) {
    const uint64_t matrix = zeros();
    float d[8][4];
    quire::wgmma_fence(d);
    quire::wgmma<__half, 64, quire::Rows::K>(d, matrix, matrix, false);  // here: written_sums
    quire::wgmma_commit();
    d[1][2] = 3.0f;
    quire::wgmma_wait<0>(d);
}
QUIRE_EXPORT(written_sums);

extern "C" __global__ void changed_factor(float*, const __grid_constant__ TensorMap) {
    const uint64_t matrix = zeros();
    float d[8][4];
    uint32_t a[4] = {1, 2, 3, 4};
    quire::wgmma_fence(d);
    quire::wgmma<__half, 64, quire::Rows::K>(d, a, matrix, false);  // here: changed_factor
    quire::wgmma_commit();
    a[2] = 5;
    quire::wgmma_wait<0>(d);
}
QUIRE_EXPORT(changed_factor);

extern "C" __global__ void product_of_flying(float*, const __grid_constant__ TensorMap map) {
    const OneBox block = make_block();
    begin(block, map);
    __syncthreads();
    const uint64_t matrix = quire::matrix_in_128(block.shared, 16, 1024);
    float d[8][4];
    quire::wgmma_fence(d);
    quire::wgmma<__half, 64, quire::Rows::K>(d, matrix, matrix, false);  // here: product_of_flying
    quire::mbarrier_wait(block.barrier, 0);
    quire::wgmma_commit();
    quire::wgmma_wait<0>(d);
}
QUIRE_EXPORT(product_of_flying);

extern "C" __global__ void different_products(float*, const __grid_constant__ TensorMap) {
    const uint64_t matrix = zeros();
    float d[8][4];
    quire::wgmma_fence(d);
    quire::wgmma<__half, 64, quire::Rows::K>(d, matrix, matrix + threadIdx.x / 32, false);  // here: different_products
    quire::wgmma_commit();
    quire::wgmma_wait<0>(d);
}
QUIRE_EXPORT(different_products);

// 96 of 128 threads take part.
extern "C" __global__ void part_of_a_warpgroup(float*, const __grid_constant__ TensorMap) {
    const uint64_t matrix = zeros();
    float d[8][4];
    if (threadIdx.x >= 96) return;
    quire::wgmma_fence(d);
    quire::wgmma<__half, 64, quire::Rows::K>(d, matrix, matrix, false);  // here: part_of_a_warpgroup
    quire::wgmma_commit();
    quire::wgmma_wait<0>(d);
}
QUIRE_EXPORT(part_of_a_warpgroup);
