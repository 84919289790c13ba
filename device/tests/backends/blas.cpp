// A cuBLASLt in host code, for tests: libcublasLt.so.13 with the calls that device/src/cuda/blas.rs makes, strict about each of
// them.
//
// A product stays in its stream, which belongs to the driver (driver.cpp). Column-major as the real library: D = op(A) B +
// bias, with leading dimensions; C is D, the factors are 1 and 0. A destroyed descriptor, a layout that does not fit, a
// workspace smaller than needed, and anything that still exists when the handle is destroyed are errors. The environment variable
// FAKE_BLAS_VERSION changes its version.
//
// The heuristics name three algorithms. The first serves many rows only, and sums in another order than the third. The second
// may split k, and then needs more workspace the more rows there are; if it may not, its order depends on the number of rows
// that it was asked for. The third serves at most 1000 rows, and not 12 outputs. From 200 rows on each needs some workspace. As
// in the real library, the caller must ask whether an algorithm serves other rows.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <set>

// In driver.cpp: checks the memory that the work reads and writes, then enqueues it; returns 0 on success.
extern "C" int fake_driver_enqueue(void* stream, const unsigned long long* addresses, const size_t* bytes, int count,
                                   std::function<void()>* work);

namespace {

enum Status { SUCCESS = 0, INVALID_VALUE = 7, EXECUTION_FAILED = 13, NOT_SUPPORTED = 15 };
enum Type { R_32F = 0, R_16F = 2, R_8I = 3, R_32I = 10, R_16BF = 14, R_8F_E4M3 = 28 };
enum Compute { COMPUTE_32F = 68, COMPUTE_32I = 72 };

struct Layout {
    int type;
    uint64_t rows, columns;
    int64_t leading;
    int32_t batch = 1;
    int64_t offset = 0;
};
struct Product {
    int compute, transposed = 0, epilogue = 1, bias_type = -1;
    unsigned long long bias = 0;
};
struct Preference {
    size_t workspace = 0;
    uint32_t reductions = 7, alignment_c = 256, alignment_d = 256;
};
struct Algorithm {
    uint64_t data[8];
};
struct Heuristic {
    Algorithm algorithm;
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
};
constexpr uint64_t MARK = 0x6b6c617320746c62;

std::set<void*> alive;

template <class T>
int make(T** out, T value) {
    alive.insert(*out = new T(value));
    return SUCCESS;
}
template <class T>
int destroy(T* what) {
    if (!alive.erase(what)) return INVALID_VALUE;
    delete what;
    return SUCCESS;
}

size_t size_of(int type) { return type == R_32F || type == R_32I ? 4 : type == R_8I || type == R_8F_E4M3 ? 1 : 2; }

float half_to_float(uint16_t code) {
    const int exponent = code >> 10 & 31, fraction = code & 1023;
    const float magnitude = exponent ? std::ldexp(1024.0f + fraction, exponent - 25) : std::ldexp(1.0f * fraction, -24);
    return code >> 15 ? -magnitude : magnitude;
}
float read(int type, unsigned long long at, size_t index) {
    const char* from = reinterpret_cast<const char*>(at) + index * size_of(type);
    uint32_t bits = 0;
    std::memcpy(&bits, from, size_of(type));
    if (type == R_8I) return static_cast<int8_t>(bits);
    if (type == R_8F_E4M3) return (bits & 0x7f) == 0x7f ? NAN : half_to_float(static_cast<uint16_t>((bits & 0x80) << 8 | (bits & 0x7f) << 7)) * 256;
    if (type == R_16F) return half_to_float(static_cast<uint16_t>(bits));
    if (type == R_16BF) bits <<= 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
// Rounds to the nearest number of the type by trying its neighbours, so that it shares no code with what is tested.
void write(int type, unsigned long long at, size_t index, float value) {
    char* to = reinterpret_cast<char*>(at) + index * size_of(type);
    if (type == R_32I) {
        const int32_t whole = static_cast<int32_t>(value);
        std::memcpy(to, &whole, 4);
        return;
    }
    if (type == R_32F) {
        std::memcpy(to, &value, 4);
        return;
    }
    uint16_t best = 0;
    float error = INFINITY;
    for (uint32_t code = 0; code < 0x10000; code++) {
        const uint16_t candidate = static_cast<uint16_t>(code);
        const float found = read(type, reinterpret_cast<unsigned long long>(&candidate), 0), off = std::fabs(found - value);
        if (off < error || (off == error && !(code & 1) && (best & 1))) error = off, best = candidate;
    }
    std::memcpy(to, &best, 2);
}

bool fits(const Product* product, const Layout* a, const Layout* b, const Layout* d) {
    return product->transposed == 1 && a->rows == b->rows && a->columns == d->rows && b->columns == d->columns &&
           a->type == b->type && a->leading >= static_cast<int64_t>(a->rows) && b->leading >= static_cast<int64_t>(b->rows) &&
           d->leading >= static_cast<int64_t>(d->rows) && a->batch == b->batch && a->batch == d->batch &&
           (a->batch == 1 || product->epilogue == 1) && (a->type == R_8I) == (product->compute == COMPUTE_32I) &&
           (a->type == R_8I) == (d->type == R_32I) &&
           // Tensor cores of 8 bits.
           (size_of(a->type) > 1 || (a->rows % 16 == 0 && a->columns % 16 == 0 && product->epilogue == 1)) &&
           (product->epilogue == 1 || (product->epilogue == 4 && product->bias_type == d->type));
}

// The workspace that an algorithm needs for a result: the sums of the parts.
size_t needed(const Algorithm& algorithm, const Layout* d) {
    const size_t always = d->columns >= 200 ? 4096 : 0;
    return algorithm.data[3] > 1 ? algorithm.data[3] * d->rows * d->columns * sizeof(float) : always;
}
bool serves(const Algorithm& algorithm, const Layout* d, size_t workspace) {
    return d->columns >= algorithm.data[5] && d->columns <= algorithm.data[7] && needed(algorithm, d) <= workspace;
}

}  // namespace

#define CALL(name, ...) extern "C" __attribute__((visibility("default"))) int name(__VA_ARGS__)

extern "C" __attribute__((visibility("default"))) size_t cublasLtGetVersion() {
    const char* text = std::getenv("FAKE_BLAS_VERSION");
    return text ? std::atoi(text) : 130000;
}
CALL(cublasLtCreate, int** handle) { return make(handle, 0); }
CALL(cublasLtDestroy, int* handle) {
    const int outcome = destroy(handle);
    return alive.empty() ? outcome : INVALID_VALUE;
}
CALL(cublasLtMatrixLayoutCreate, Layout** layout, int type, uint64_t rows, uint64_t columns, int64_t leading) {
    return make(layout, Layout{type, rows, columns, leading});
}
CALL(cublasLtMatrixLayoutSetAttribute, Layout* layout, int attribute, const void* value, size_t bytes) {
    void* const to = attribute == 3   ? static_cast<void*>(&layout->columns)
                     : attribute == 5 ? static_cast<void*>(&layout->batch)
                     : attribute == 6 ? static_cast<void*>(&layout->offset)
                                      : nullptr;
    if (!alive.count(layout) || !to || bytes != (attribute == 5 ? 4u : 8u)) return INVALID_VALUE;
    std::memcpy(to, value, bytes);
    return SUCCESS;
}
CALL(cublasLtMatrixLayoutDestroy, Layout* layout) { return destroy(layout); }
CALL(cublasLtMatmulDescCreate, Product** product, int compute, int scale) {
    const bool known = (compute == COMPUTE_32F && scale == R_32F) || (compute == COMPUTE_32I && scale == R_32I);
    return known ? make(product, Product{compute}) : INVALID_VALUE;
}
CALL(cublasLtMatmulDescDestroy, Product* product) { return destroy(product); }
CALL(cublasLtMatmulDescSetAttribute, Product* product, int attribute, const void* value, size_t bytes) {
    if (!alive.count(product)) return INVALID_VALUE;
    void* const to = attribute == 3    ? static_cast<void*>(&product->transposed)
                     : attribute == 7  ? static_cast<void*>(&product->epilogue)
                     : attribute == 8  ? static_cast<void*>(&product->bias)
                     : attribute == 26 ? static_cast<void*>(&product->bias_type)
                                       : nullptr;
    if (!to || bytes != (attribute == 8 ? 8u : 4u)) return INVALID_VALUE;
    std::memcpy(to, value, bytes);
    return SUCCESS;
}
CALL(cublasLtMatmulPreferenceCreate, Preference** preference) { return make(preference, Preference()); }
CALL(cublasLtMatmulPreferenceDestroy, Preference* preference) { return destroy(preference); }
CALL(cublasLtMatmulPreferenceSetAttribute, Preference* preference, int attribute, const void* value, size_t bytes) {
    void* const to = attribute == 1   ? static_cast<void*>(&preference->workspace)
                     : attribute == 3 ? static_cast<void*>(&preference->reductions)
                     : attribute == 7 ? static_cast<void*>(&preference->alignment_c)
                     : attribute == 8 ? static_cast<void*>(&preference->alignment_d)
                                      : nullptr;
    if (!alive.count(preference) || !to || bytes != (attribute == 1 ? 8u : 4u)) return INVALID_VALUE;
    std::memcpy(to, value, bytes);
    return SUCCESS;
}
CALL(cublasLtMatmulAlgoGetHeuristic, void* handle, const Product* product, const Layout* a, const Layout* b, const Layout* c,
     const Layout* d, const Preference* preference, int wanted, Heuristic* results, int* found) {
    if (!alive.count(handle) || !alive.count(const_cast<Preference*>(preference)) || wanted < 3) return INVALID_VALUE;
    if (c != d || !fits(product, a, b, d)) return INVALID_VALUE;
    // Depending on the number of rows, splits k differently and adds up the sums, unless that is forbidden; then only the
    // length of the first part differs.
    const bool splits = preference->reductions && preference->workspace;
    const uint64_t parts = splits ? 1 + b->columns % 5 : 1, first = splits ? 0 : b->columns % 7;
    const auto algorithm = [&](uint64_t parts, uint64_t first, uint64_t least_rows, uint64_t most_rows) {
        const uint64_t alignment = std::min(preference->alignment_c, preference->alignment_d);
        return Heuristic{{{MARK, a->columns, a->rows, parts, first, least_rows, alignment, most_rows}}, 0, SUCCESS, 1.0f, {}};
    };
    const uint64_t any = UINT64_MAX, least = a->columns == 12 ? 2 : 0;
    *found = 0;
    for (const Heuristic& candidate :
         {algorithm(1, 3, 100, any), algorithm(parts, first, least, any), algorithm(1, 0, least, 1000)}) {
        results[*found] = candidate;
        results[*found].state = serves(candidate.algorithm, d, preference->workspace) ? SUCCESS : NOT_SUPPORTED;
        ++*found;
    }
    return SUCCESS;
}
CALL(cublasLtMatmulAlgoConfigGetAttribute, const Algorithm* algorithm, int attribute, void* value, size_t bytes, size_t* written) {
    if (algorithm->data[0] != MARK || attribute != 2 || bytes != 4 || !written) return INVALID_VALUE;
    const uint32_t parts = static_cast<uint32_t>(algorithm->data[3]);
    std::memcpy(value, &parts, *written = 4);
    return SUCCESS;
}
CALL(cublasLtMatmulAlgoCheck, void* handle, const Product* product, const Layout* a, const Layout* b, const Layout* c,
     const Layout* d, const Algorithm* algorithm, Heuristic* result) {
    if (!alive.count(handle) || c != d || !fits(product, a, b, d)) return INVALID_VALUE;
    if (!serves(*algorithm, d, SIZE_MAX)) return NOT_SUPPORTED;
    *result = {*algorithm, needed(*algorithm, d), SUCCESS, 1.0f, {}};
    return SUCCESS;
}
CALL(cublasLtMatmul, void* handle, const Product* product, const void* alpha, unsigned long long a, const Layout* a_layout,
     unsigned long long b, const Layout* b_layout, const void* beta, unsigned long long c, const Layout*,
     unsigned long long d, const Layout* d_layout, const Algorithm* algorithm, unsigned long long workspace,
     size_t workspace_bytes, void* stream) {
    const uint64_t n = d_layout->rows, k = a_layout->rows, rows = d_layout->columns;
    const uint64_t expected[] = {MARK, n, k}, parts = algorithm->data[3], first = algorithm->data[4];
    const int32_t whole[] = {1, 0};
    const float floats[] = {1, 0};
    const char* factors = reinterpret_cast<const char*>(product->compute == COMPUTE_32I ? static_cast<const void*>(whole) : floats);
    if (!alive.count(handle) || c != d || std::memcmp(algorithm, expected, sizeof expected)) return INVALID_VALUE;
    if (std::memcmp(alpha, factors, 4) || std::memcmp(beta, factors + 4, 4)) return INVALID_VALUE;
    if (d % algorithm->data[6] || (product->epilogue == 4 && product->bias % algorithm->data[6])) return INVALID_VALUE;
    if (!fits(product, a_layout, b_layout, d_layout)) return INVALID_VALUE;
    if (!serves(*algorithm, d_layout, workspace_bytes)) return NOT_SUPPORTED;
    const Layout al = *a_layout, bl = *b_layout, dl = *d_layout;
    const unsigned long long bias = product->epilogue == 4 ? product->bias : 0;
    const unsigned long long memory[] = {a, b, d, workspace, bias ? bias : d};
    const uint64_t last = al.batch - 1;
    const auto size = [&](const Layout& of, uint64_t count, uint64_t of_last) {
        return (of.offset * last + of.leading * (count - 1) + of_last) * size_of(of.type);
    };
    const size_t bytes[] = {size(al, n, k), size(bl, rows, k), size(dl, rows, n), workspace_bytes, n * size_of(dl.type)};
    std::function<void()> work = [=] {
        for (uint64_t all = rows * (last + 1), at = 0; at < all; at++) {
            const uint64_t row = at % rows, slice = at / rows;
            for (uint64_t column = 0; column < n; column++) {
                const auto product = [&](uint64_t i) {
                    return read(al.type, a, slice * al.offset + column * al.leading + i) *
                           read(bl.type, b, slice * bl.offset + row * bl.leading + i);
                };
                // Sums of integers are exact in the numbers of a test.
                float sum = 0;
                for (uint64_t part = 0; part < parts; part++) {
                    float of_part = 0;
                    for (uint64_t i = part; i < k; i += parts) of_part += product((i + first) % k);
                    sum += of_part;
                }
                write(dl.type, d, slice * dl.offset + row * dl.leading + column, sum + (bias ? read(dl.type, bias, column) : 0));
            }
        }
    };
    return fake_driver_enqueue(stream, memory, bytes, 5, &work) ? EXECUTION_FAILED : SUCCESS;
}
