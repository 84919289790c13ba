// experts_sm90: the products of experts of linear.cu for Hopper only, of weights that are codes or numbers.
//
// experts_sm90_<form>_<type>_<rows>   grid (ceil(n / 128), parts), 256 threads: 128 outputs of up to `rows` assignments of an expert
//
// Assignments are sorted by expert: order_rows (rounded.cu) gathers their rows of x, so the rows of a part are one box. A block finds its part
// from `starts`, as those of linear.cu do. Blocks without a part return at once. wide_linear.cuh has the loop; k is one slice.

#include "wide_linear.cuh"

#define EXPERTS_SM90(form, Form, type, T, rows)                                                                                 \
    extern "C" __global__ void __launch_bounds__((quire::WideShape<T, quire::Form, rows>::THREADS),                             \
                                                 (quire::WideShape<T, quire::Form, rows>::BLOCKS))                              \
        experts_sm90_##form##_##type##_##rows(const void* weights, const float* table, const void* bias, void* y,               \
                                              const uint32_t* order, const uint32_t* starts, const quire::LinearShape shape,    \
                                              const __grid_constant__ quire::TensorMap x) {                                     \
        quire::wait_for_launches();                                                                                             \
        extern __shared__ __align__(1024) unsigned char smem[];                                                                 \
        const quire::LinearPart part = quire::find_part(starts, rows, shape);                                                   \
        if (part.count == 0) return;                                                                                            \
        quire::linear_sm90<quire::WideShape<T, quire::Form, rows>>(x, weights, table, bias, y, order, part, shape, smem);       \
    }                                                                                                                           \
    QUIRE_EXPORT_TILED(experts_sm90_##form##_##type##_##rows, sizeof(quire::WideShape<T, quire::Form, rows>::Shared),           \
                       (quire::WideShape<T, quire::Form, rows>::THREADS), rows);
#define EXPERTS_SM90_ROWS(form, Form, type, T)  \
    EXPERTS_SM90(form, Form, type, T, 16)       \
    EXPERTS_SM90(form, Form, type, T, 64)       \
    EXPERTS_SM90(form, Form, type, T, 128)
#define EXPERTS_SM90_FORMS(type, T)                 \
    EXPERTS_SM90_ROWS(numbers, Numbers, type, T)    \
    EXPERTS_SM90_ROWS(narrow4, Narrow4, type, T)    \
    EXPERTS_SM90_ROWS(codes4, Codes4, type, T)      \
    EXPERTS_SM90_ROWS(table4, Table4, type, T)      \
    EXPERTS_SM90_ROWS(codes8, Codes8, type, T)      \
    EXPERTS_SM90_ROWS(e4m3, E4m3, type, T)

#ifdef QUIRE_F16
EXPERTS_SM90_FORMS(f16, __half)
#endif
#ifdef QUIRE_BF16
EXPERTS_SM90_FORMS(bf16, __nv_bfloat16)
EXPERTS_SM90_ROWS(split4, Split4, bf16, __nv_bfloat16)
#endif
