// reduce_absmax, reduce_minmax. Floats are compared as integers: their magnitudes order like their bits, infinity and
// then NaN above all finite values, so that one maximum tells both the result and whether it is finite.

// What happens to NaN and infinities while reducing.
enum class Special { KEEP, SATURATE, DROP };

template <class T> constexpr typename T::Bits MAGNITUDE = std::numeric_limits<typename T::Bits>::max();

template <class T, Special SPECIAL> inline typename T::Bits treated(typename T::Bits bits) {
    if constexpr (SPECIAL == Special::SATURATE) {
        return saturated<T>(bits);
    } else if constexpr (SPECIAL == Special::DROP) {
        return (bits & MAGNITUDE<T>) >= (typename T::Bits)T::INF ? 0 : bits;
    } else {
        return bits;
    }
}

// Signed integers in the order of the floats (-0 below +0), and back.
template <class T> inline typename T::Bits order(typename T::Bits bits) {
    return bits ^ ((bits >> (8 * sizeof bits - 1)) & MAGNITUDE<T>);
}

template <class T, Special SPECIAL> struct Largest {
    typedef typename T::Bits Bits;
    static constexpr int COUNT = 1;
    static constexpr Bits INITIAL[] = {0};
    static void fold(Bits (&sofar)[1], Bits bits) {
        sofar[0] = std::max<Bits>(sofar[0], treated<T, SPECIAL>(bits) & MAGNITUDE<T>);
    }
};

template <class T, Special SPECIAL> struct Extremes {
    typedef typename T::Bits Bits;
    static constexpr int COUNT = 2;
    static constexpr Bits INITIAL[] = {MAGNITUDE<T>, (Bits)~MAGNITUDE<T>};
    static void fold(Bits (&sofar)[2], Bits bits) {
        const Bits key = order<T>(treated<T, SPECIAL>(bits));
        sofar[0] = std::min<Bits>(sofar[0], key);
        sofar[1] = std::max<Bits>(sofar[1], key);
    }
};

// Folds n elements into one result.
template <class Fold, class Step>
inline void fold_row(const char *p, Step step, int64_t n, typename Fold::Bits (&sofar)[Fold::COUNT]) {
    for (int64_t i = 0; i < n; ++i) {
        Fold::fold(sofar, load<typename Fold::Bits>(p + i * step));
    }
}

// The same for any step, with unit steps as fast as they can be.
template <class Fold>
inline void fold_strided(const char *p, int64_t step, int64_t n, typename Fold::Bits (&sofar)[Fold::COUNT]) {
    constexpr std::integral_constant<int64_t, sizeof(typename Fold::Bits)> UNIT;
    if (step == UNIT) {
        fold_row<Fold>(p, UNIT, n, sofar);
    } else {
        fold_row<Fold>(p, step, n, sofar);
    }
}

// Folds n elements into n results each; those of one kind are `count` apart.
template <class Fold, class Step>
inline void fold_columns(const char *__restrict p, Step step, int64_t n, typename Fold::Bits *__restrict results,
                         int64_t count) {
    typedef typename Fold::Bits Bits;
    for (int64_t i = 0; i < n; ++i) {
        Bits sofar[Fold::COUNT];
        for (int k = 0; k < Fold::COUNT; ++k) {
            sofar[k] = results[k * count + i];
        }
        Fold::fold(sofar, load<Bits>(p + i * step));
        for (int k = 0; k < Fold::COUNT; ++k) {
            results[k * count + i] = sofar[k];
        }
    }
}

// Folds each group of x; results are [COUNT][groups].
template <class Fold> void fold_groups(const kv_array &x, const Groups &groups, typename Fold::Bits *results) {
    typedef typename Fold::Bits Bits;
    constexpr std::integral_constant<int64_t, sizeof(Bits)> UNIT;
    for (int k = 0; k < Fold::COUNT; ++k) {
        std::fill_n(results + k * groups.count, groups.count, Fold::INITIAL[k]);
    }
    Nest<2> nest;
    nest.base[0] = static_cast<int64_t>(x.data);
    for (int d = 0; d < x.ndim; ++d) {
        nest.add(x.shape[d], {x.stride[d], groups.step[d]});
    }
    walk_parallel(nest, bytes_of(x), 1, [&](const Slab<2> &t) {
        for (int64_t r = 0; r < t.rows; ++r) {
            const char *p = reinterpret_cast<const char *>(t.at[0] + r * t.row_step[0]);
            Bits *result = results + t.at[1] + r * t.row_step[1];
            if (t.step[1] != 0) {
                if (t.step[0] == UNIT) {
                    fold_columns<Fold>(p, UNIT, t.cols, result, groups.count);
                } else {
                    fold_columns<Fold>(p, t.step[0], t.cols, result, groups.count);
                }
                continue;
            }
            Bits sofar[Fold::COUNT];
            for (int k = 0; k < Fold::COUNT; ++k) {
                sofar[k] = result[k * groups.count];
            }
            fold_strided<Fold>(p, t.step[0], t.cols, sofar);
            for (int k = 0; k < Fold::COUNT; ++k) {
                result[k * groups.count] = sofar[k];
            }
        }
    });
}

template <class T> void report_nonfinite(const kv_array &x, uint64_t *status) {
    report_first(x, status, [](const char *p) {
        return (load<typename T::Bits>(p) & MAGNITUDE<T>) >= (typename T::Bits)T::INF ? KV_NONFINITE : 0;
    });
}

enum class Verdict { FINITE, SPECIAL, REFUSED };

// The float of a result; one zero, one NaN.
template <class T> inline float result_of(typename T::Bits bits) {
    const typename T::Bits size = bits & MAGNITUDE<T>;
    T x;
    x.bits = static_cast<decltype(x.bits)>(size == 0 ? 0 : bits);
    return size > (typename T::Bits)T::INF ? as_float(F32::NAN_BITS) : widened(x);
}

// The largest magnitude of each group, by the policy; `propagated` is what "propagate" means here. What is REFUSED has
// been reported.
template <class T>
Verdict absmax(const kv_array &x, const Groups &groups, int32_t nonfinite, Special propagated, float *largest,
               uint64_t *status) {
    typedef typename T::Bits Bits;
    static thread_local Scratch scratch;
    Bits *results = scratch.take<Bits>(groups.count);
    fold_groups<Largest<T, Special::KEEP>>(x, groups, results);
    Bits top = 0;
    for (int64_t g = 0; g < groups.count; ++g) {
        top = std::max(top, results[g]);
    }
    const bool special = top >= (Bits)T::INF;
    if (special && nonfinite == KV_ERROR) {
        report_nonfinite<T>(x, status);
        return Verdict::REFUSED;
    }
    if (special && nonfinite == KV_SATURATE) {
        fold_groups<Largest<T, Special::SATURATE>>(x, groups, results);
    } else if (special && propagated == Special::DROP) {
        fold_groups<Largest<T, Special::DROP>>(x, groups, results);
    }
    for (int64_t g = 0; g < groups.count; ++g) {
        largest[g] = result_of<T>(results[g]);
    }
    return special ? Verdict::SPECIAL : Verdict::FINITE;
}

// Smallest and largest value of each group.
template <class T>
Verdict minmax(const kv_array &x, const Groups &groups, int32_t nonfinite, float *low, float *high, uint64_t *status) {
    typedef typename T::Bits Bits;
    constexpr Bits INF = (Bits)T::INF, MINUS_INF = (Bits)~T::INF; // in the order of order()
    static thread_local Scratch scratch;
    Bits *lows = scratch.take<Bits>(2 * groups.count), *highs = lows + groups.count;
    fold_groups<Extremes<T, Special::KEEP>>(x, groups, lows);
    Bits bottom = 0, top = 0;
    for (int64_t g = 0; g < groups.count; ++g) {
        bottom = std::min(bottom, lows[g]);
        top = std::max(top, highs[g]);
    }
    const bool special = top >= INF || bottom <= MINUS_INF;
    if (special && nonfinite == KV_ERROR) {
        report_nonfinite<T>(x, status);
        return Verdict::REFUSED;
    }
    if (special && nonfinite == KV_SATURATE) {
        fold_groups<Extremes<T, Special::SATURATE>>(x, groups, lows);
    }
    for (int64_t g = 0; g < groups.count; ++g) {
        const bool nan = highs[g] > INF || lows[g] < MINUS_INF;
        low[g] = nan ? as_float(F32::NAN_BITS) : result_of<T>(order<T>(lows[g]));
        high[g] = nan ? as_float(F32::NAN_BITS) : result_of<T>(order<T>(highs[g]));
    }
    return special ? Verdict::SPECIAL : Verdict::FINITE;
}

// Writes values of groups, in C order, to one of the arrays [lead, ...] of an output; -1: the output has no such axis.
template <class V> void write_groups(const kv_array &out, int lead, const V *values) {
    char *data = reinterpret_cast<char *>(out.data) + (lead > 0 ? lead * out.stride[0] : 0);
    each_element(out, lead >= 0, data, [&](char *p, int64_t i) { store(p, values[i]); });
}

int32_t reduce_absmax(const kv_reduce_args &a, uint64_t *status) {
    return with_float(a.x.dtype, [&](auto tag) {
        static thread_local Scratch scratch;
        const Groups groups(a.x, a.axes);
        float *largest = scratch.take<float>(groups.count);
        if (absmax<decltype(tag)>(a.x, groups, a.nonfinite, Special::KEEP, largest, status) != Verdict::REFUSED) {
            write_groups(a.out, -1, largest);
        }
        return 0;
    });
}

int32_t reduce_minmax(const kv_reduce_args &a, uint64_t *status) {
    return with_float(a.x.dtype, [&](auto tag) {
        static thread_local Scratch scratch;
        const Groups groups(a.x, a.axes);
        float *low = scratch.take<float>(2 * groups.count), *high = low + groups.count;
        if (minmax<decltype(tag)>(a.x, groups, a.nonfinite, low, high, status) != Verdict::REFUSED) {
            write_groups(a.out, 0, low);
            write_groups(a.out, 1, high);
        }
        return 0;
    });
}

