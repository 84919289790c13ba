// The cuts of a row, placed within the bins that sample_filter left undecided: top_k, top_p, typical_p, in that order and
// without sorting.
#pragma once

#include "block.cuh"
#include "filter.cuh"

namespace quire {

// Whether the row's list holds the undecided tokens. Otherwise there are so many that they are looked for in the row.
__device__ __forceinline__ bool is_listed(const Cut& cut) { return cut.listed <= LIST; }

// Calls `use(token, logit)` for the undecided tokens of this thread. `cut` is that of sample_filter.
template <class Use>
__device__ __forceinline__ void each_undecided(const Values<float>& scaled, const Mass* list, const Cut& cut, Use use) {
    if (is_listed(cut)) {
        for (uint32_t i = threadIdx.x; i < cut.listed; i += ROW_THREADS) use(token_of(list[i]), logit_of(list[i]));
    } else {
        each_token(scaled, [&](uint32_t token, float logit) {
            if (key_of(logit) >= cut.key && undecided(cut, bin_of(cut, logit))) use(token, logit);
        });
    }
}

// top_p: keeps the fewest likeliest undecided tokens that have the mass `target`; of equal ones the lowest ids. `each(use)`
// calls `use(token, logit)` for those that top_k keeps.
template <class Each>
__device__ __forceinline__ void top_p(RowShared& shared, Mass target, Each each, Cut& cut) {
    const float largest = cut.largest;
    const Selected selected = select(shared, target, [&](const auto& use) {
        each([&](uint32_t, float logit) { use(key_of(logit), weight(__fsub_rn(logit, largest))); });
    });
    cut.key = selected.key;
    const Mass one = weight(__fsub_rn(of_key(selected.key), largest));
    const Mass needed = (target - selected.above + one - 1) / one;
    if (needed * one < selected.at) {
        cut.last = last_of_lowest(shared, needed, [&](const auto& use) {
            each([&](uint32_t token, float logit) {
                if (key_of(logit) == selected.key) use(token);
            });
        });
    }
}

// typical_p (Meister et al., 2022): keeps the tokens nearest to the mean of the logits that have the wanted share of
// the mass.
__device__ __forceinline__ void typical_p(RowShared& shared, const Values<float>& scaled, float share, Cut& cut) {
    const Cut before = cut;
    Mass mass = 0, moment = 0;  // the moment is a negative number in two's complement
    each_token(scaled, [&](uint32_t token, float logit) {
        if (!kept(before, logit, token)) return;
        mass += weight(__fsub_rn(logit, before.largest));
        moment += static_cast<Mass>(weighted(__fsub_rn(logit, before.largest)));
    });
    mass = block_fold<ROW_THREADS>(mass, shared.warp_values, Sum());
    moment = block_fold<ROW_THREADS>(moment, shared.warp_values, Sum());
    const float mean = static_cast<float>(__ddiv_rn(static_cast<double>(static_cast<long long>(moment)), static_cast<double>(mass)));
    const Selected selected = select(shared, share_of(mass, share), [&](const auto& use) {
        each_token(scaled, [&](uint32_t token, float logit) {
            if (!kept(before, logit, token)) return;
            use(~__float_as_uint(distance(logit, before.largest, mean)), weight(__fsub_rn(logit, before.largest)));
        });
    });
    cut.mean = mean;
    if (selected.found) cut.reach = __uint_as_float(~selected.key);
}

// Completes `cut`, at first a copy of `bounds`, that of sample_filter.
__device__ __forceinline__ void place(RowShared& shared, const RowParams& params, const Values<float>& scaled, const Mass* list,
                                      const Cut& bounds, Cut& cut) {
    const bool has_top_p = params.top_p < 1.0f && bounds.first_bin != NONE;
    Mass mass = bounds.mass_before_k;  // that top_p takes its share of
    if (bounds.needed) {
        const auto each_in_k_bin = [&](const auto& use) {
            each_undecided(scaled, list, bounds, [&](uint32_t, float logit) {
                if (bin_of(bounds, logit) == bounds.k_bin) use(key_of(logit), logit);
            });
        };
        const auto count = [&](const auto& use) { each_in_k_bin([&](uint32_t key, float) { use(key, Mass(1)); }); };
        cut.key = select(shared, bounds.needed, count).key;
        Mass own = 0;
        if (has_top_p) {
            each_in_k_bin([&](uint32_t key, float logit) {
                if (key >= cut.key) own += weight(__fsub_rn(logit, bounds.largest));
            });
        }
        mass += block_fold<ROW_THREADS>(own, shared.warp_values, Sum());
    }
    if (has_top_p) {
        const uint32_t least = cut.key;
        const auto each_of_top_k = [&](const auto& use) {
            each_undecided(scaled, list, bounds, [&](uint32_t token, float logit) {
                if (key_of(logit) >= least) use(token, logit);
            });
        };
        top_p(shared, share_of(mass, params.top_p) - bounds.mass_before, each_of_top_k, cut);
    }
    if (params.typical_p < 1.0f) typical_p(shared, scaled, params.typical_p, cut);
}

}  // namespace quire
