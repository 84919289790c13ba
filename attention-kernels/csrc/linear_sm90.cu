// linear_sm90: the function of linear.cu for Hopper only and more rows, of weights that are codes and not those of experts.
//
// linear_sm90_<form>_<type>_<rows>   grid (ceil(n / 128), ceil(rows of x / rows), slices of k), 256 threads
//
// wide_linear.cuh has the loop, and order_rows (rounded.cu) brings rows of x to the order of the codes before.

#include "wide_linear.cuh"

#define LINEAR_SM90(form, Form, type, T, rows)                                                                                  \
    extern "C" __global__ void __launch_bounds__((quire::WideShape<T, quire::Form, rows>::THREADS),                             \
                                                 (quire::WideShape<T, quire::Form, rows>::BLOCKS))                              \
        linear_sm90_##form##_##type##_##rows(const void* weights, const float* table, const void* bias, void* y,                \
                                             const quire::LinearShape shape, const __grid_constant__ quire::TensorMap x) {      \
        quire::wait_for_launches();                                                                                             \
        extern __shared__ __align__(1024) unsigned char smem[];                                                                 \
        const quire::LinearPart part = quire::part_of_rows(rows, shape);                                                        \
        quire::linear_sm90<quire::WideShape<T, quire::Form, rows>>(x, weights, table, bias, y, nullptr, part, shape, smem);     \
    }                                                                                                                           \
    QUIRE_EXPORT_TILED(linear_sm90_##form##_##type##_##rows, sizeof(quire::WideShape<T, quire::Form, rows>::Shared),            \
                       (quire::WideShape<T, quire::Form, rows>::THREADS), rows);
#define LINEAR_SM90_ROWS(form, Form, type, T)   \
    LINEAR_SM90(form, Form, type, T, 16)        \
    LINEAR_SM90(form, Form, type, T, 32)        \
    LINEAR_SM90(form, Form, type, T, 64)        \
    LINEAR_SM90(form, Form, type, T, 128)       \
    LINEAR_SM90(form, Form, type, T, 256)
#ifndef LINEAR_SM90_FORMS
#define LINEAR_SM90_FORMS(type, T)              \
    LINEAR_SM90_ROWS(narrow4, Narrow4, type, T) \
    LINEAR_SM90_ROWS(codes4, Codes4, type, T)   \
    LINEAR_SM90_ROWS(table4, Table4, type, T)   \
    LINEAR_SM90_ROWS(codes8, Codes8, type, T)   \
    LINEAR_SM90_ROWS(e4m3, E4m3, type, T)
#endif

#ifdef QUIRE_F16
LINEAR_SM90_FORMS(f16, __half)
#endif
#ifdef QUIRE_BF16
LINEAR_SM90_FORMS(bf16, __nv_bfloat16)
LINEAR_SM90_ROWS(split4, Split4, bf16, __nv_bfloat16)
#endif
