// The grid of template instances that a kernel is compiled for, and their names: <kernel>_<type>_h<head size>[_kv8].
#pragma once

#include <quire/export.cuh>

#include "args.cuh"

// MAKE(name, type, 8-bit cache, head size) for every head size of one type and cache class.
#define QUIRE_EACH_HEAD_SIZE(MAKE, kernel, T, KV8, suffix) \
    MAKE(kernel##_h32##suffix, T, KV8, 32)                 \
    MAKE(kernel##_h64##suffix, T, KV8, 64)                 \
    MAKE(kernel##_h80##suffix, T, KV8, 80)                 \
    MAKE(kernel##_h96##suffix, T, KV8, 96)                 \
    MAKE(kernel##_h112##suffix, T, KV8, 112)               \
    MAKE(kernel##_h128##suffix, T, KV8, 128)               \
    MAKE(kernel##_h192##suffix, T, KV8, 192)               \
    MAKE(kernel##_h256##suffix, T, KV8, 256)

// The manifest compiles a source once for each type and cache class.
#if defined(QUIRE_F16)
#define QUIRE_EACH_INSTANCE(MAKE, kernel) QUIRE_EACH_HEAD_SIZE(MAKE, kernel##_f16, __half, false, )
#elif defined(QUIRE_F16_KV8)
#define QUIRE_EACH_INSTANCE(MAKE, kernel) QUIRE_EACH_HEAD_SIZE(MAKE, kernel##_f16, __half, true, _kv8)
#elif defined(QUIRE_BF16)
#define QUIRE_EACH_INSTANCE(MAKE, kernel) QUIRE_EACH_HEAD_SIZE(MAKE, kernel##_bf16, __nv_bfloat16, false, )
#elif defined(QUIRE_BF16_KV8)
#define QUIRE_EACH_INSTANCE(MAKE, kernel) QUIRE_EACH_HEAD_SIZE(MAKE, kernel##_bf16, __nv_bfloat16, true, _kv8)
#else
#error "one of QUIRE_F16, QUIRE_F16_KV8, QUIRE_BF16, QUIRE_BF16_KV8 says what to compile; see kernels.toml"
#endif
