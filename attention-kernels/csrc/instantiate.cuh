// The template instances that a kernel is compiled for, and their names: <kernel>_<type>_h<head size>[_kv8].
#pragma once

#include <quire/export.cuh>

#include "args.cuh"

// X(head size, ...) for each head size. src/cuda/names.rs reads the sizes from these lines, so this is their only list.
#define QUIRE_EACH_NARROW_HEAD(X, ...)                                                                  \
    QUIRE_REST(X(32, __VA_ARGS__)) X(64, __VA_ARGS__) X(80, __VA_ARGS__) QUIRE_REST(X(96, __VA_ARGS__)) \
    QUIRE_REST(X(112, __VA_ARGS__)) X(128, __VA_ARGS__)
#define QUIRE_EACH_HEAD_SIZE(X, ...) \
    QUIRE_EACH_NARROW_HEAD(X, __VA_ARGS__) QUIRE_REST(X(192, __VA_ARGS__)) X(256, __VA_ARGS__)
// A test that needs only some of the instances compiles no others.
#ifdef QUIRE_SOME_HEAD_SIZES
#define QUIRE_REST(...)
#else
#define QUIRE_REST(...) __VA_ARGS__
#endif

#define QUIRE_INSTANCE(D, MAKE, kernel, T, KV8, suffix) MAKE(kernel##_h##D##suffix, T, KV8, D)

// MAKE(name, type, 8-bit cache, head size) for each head size of EACH. The manifest compiles a source once for each type and kind
// of cache.
#if defined(QUIRE_F16)
#define QUIRE_INSTANCES(EACH, MAKE, kernel) EACH(QUIRE_INSTANCE, MAKE, kernel##_f16, __half, false, )
#elif defined(QUIRE_F16_KV8)
#define QUIRE_INSTANCES(EACH, MAKE, kernel) EACH(QUIRE_INSTANCE, MAKE, kernel##_f16, __half, true, _kv8)
#elif defined(QUIRE_BF16)
#define QUIRE_INSTANCES(EACH, MAKE, kernel) EACH(QUIRE_INSTANCE, MAKE, kernel##_bf16, __nv_bfloat16, false, )
#elif defined(QUIRE_BF16_KV8)
#define QUIRE_INSTANCES(EACH, MAKE, kernel) EACH(QUIRE_INSTANCE, MAKE, kernel##_bf16, __nv_bfloat16, true, _kv8)
#else
#error "define one of QUIRE_F16, QUIRE_F16_KV8, QUIRE_BF16, QUIRE_BF16_KV8, as kernels.toml does"
#endif
#define QUIRE_EACH_INSTANCE(MAKE, kernel) QUIRE_INSTANCES(QUIRE_EACH_HEAD_SIZE, MAKE, kernel)
#define QUIRE_EACH_NARROW_INSTANCE(MAKE, kernel) QUIRE_INSTANCES(QUIRE_EACH_NARROW_HEAD, MAKE, kernel)
