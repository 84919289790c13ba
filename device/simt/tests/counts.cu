// Kernels whose loads and stores are known, for the counts of the simulator.
#include <quire/export.cuh>
#include <quire/ptx.cuh>

// out[i] = in[from[i]]: `from` and `out` are read and written in order.
template <class T>
__device__ __forceinline__ void gather(T* out, const T* in, const int* from) {
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    out[i] = in[from[i]];
}
extern "C" __global__ void gather_bytes(unsigned char* out, const unsigned char* in, const int* from) { gather(out, in, from); }
QUIRE_EXPORT(gather_bytes);
extern "C" __global__ void gather_words(float* out, const float* in, const int* from) { gather(out, in, from); }
QUIRE_EXPORT(gather_words);
extern "C" __global__ void gather_fours(float4* out, const float4* in, const int* from) { gather(out, in, from); }
QUIRE_EXPORT(gather_fours);

// out[i] = shared[from[i]], after each thread has written shared[i]: 1024 elements.
template <class T>
__device__ __forceinline__ void gather_shared(T* out, const int* from) {
    extern __shared__ __align__(16) unsigned char smem[];
    T* shared = reinterpret_cast<T*>(smem);
    const unsigned i = threadIdx.x;
    const int at = from[i];
    shared[i] = T{};
    __syncthreads();
    out[i] = shared[at];
}
extern "C" __global__ void gather_shared_words(float* out, const int* from) { gather_shared(out, from); }
QUIRE_EXPORT(gather_shared_words);
extern "C" __global__ void gather_shared_twos(float2* out, const int* from) { gather_shared(out, from); }
QUIRE_EXPORT(gather_shared_twos);
extern "C" __global__ void gather_shared_fours(float4* out, const int* from) { gather_shared(out, from); }
QUIRE_EXPORT(gather_shared_fours);

// Adds a row of 32 words, which every block reads, to out[block][32]. Blocks from `*busy` on only read that number.
extern "C" __global__ void some_blocks(float* out, const float* row, const int* busy) {
    if (static_cast<int>(blockIdx.x) >= *busy) return;
    out[blockIdx.x * 32 + threadIdx.x] += row[threadIdx.x];
}
QUIRE_EXPORT(some_blocks);

// Even lanes read a word in the first turn, odd lanes in the second; all meet after each turn.
extern "C" __global__ void turns(float* out, const float* in) {
    float sum = 0;
    for (unsigned turn = 0; turn < 2; turn++) {
        if (threadIdx.x % 2 == turn) sum += in[threadIdx.x];
        __syncwarp();
    }
    out[threadIdx.x] = sum;
}
QUIRE_EXPORT(turns);

// Lane i reads i + 1 words in a loop, each from the row of its turn: 32 rows of 32 words.
extern "C" __global__ void triangle(float* out, const float* in) {
    float sum = 0;
    for (unsigned turn = 0; turn <= threadIdx.x; turn++) sum += in[turn * 32 + threadIdx.x];
    out[threadIdx.x] = sum;
}
QUIRE_EXPORT(triangle);

// All threads count in one word.
extern "C" __global__ void count_threads(unsigned* count) { atomicAdd(count, 1); }
QUIRE_EXPORT(count_threads);

// Copies rows of 64 halves of global memory to shared memory of pitch `pitch` (in bytes, a multiple of 16), and loads a tile of
// 16 x 16 from there; one warp.
extern "C" __global__ void tile(unsigned* out, const __half* in, int pitch) {
    extern __shared__ __align__(16) unsigned char smem[];
    const int lane = static_cast<int>(threadIdx.x);
    for (int i = lane; i < 16 * 8; i += 32) quire::cp_async16(smem + i / 8 * pitch + i % 8 * 16, in + i * 8);
    quire::cp_async_commit();
    quire::cp_async_wait<0>();
    __syncwarp();
    uint32_t tiles[4];
    quire::ldmatrix(tiles, smem + lane % 16 * pitch + lane / 16 * 16);
    out[lane] = tiles[0] ^ tiles[1] ^ tiles[2] ^ tiles[3];
}
QUIRE_EXPORT(tile);
