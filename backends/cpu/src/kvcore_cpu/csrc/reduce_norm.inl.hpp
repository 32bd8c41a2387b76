// reduce_norm: the L2 norm by a fixed tree.

// The norm of n scaled-down values, which are lost: upper half onto lower half, until one is left.
inline float tree_norm(float *values, int64_t n, float down, float up) {
    int64_t size = 1;
    while (size < n) {
        size *= 2;
    }
    for (int64_t i = 0; i < n; ++i) {
        const float scaled = values[i] * down;
        values[i] = std::fabs(scaled) < 0x1p-24f ? 0 : scaled * scaled;
    }
    // The padding is zeros; adding one changes nothing, squares being +0 or more.
    for (size /= 2; size > 0; size /= 2) {
        for (int64_t i = 0; i < std::min(size, n - size); ++i) {
            values[i] += values[i + size];
        }
        n = std::min(n, size);
    }
    return std::sqrt(values[0]) * up;
}

// Turns the largest magnitudes of groups into their norms. `saturates`: there are infinities or NaN, to be held.
template <class T> void norms(const kv_array &x, const Groups &groups, uint32_t axes, bool saturates, float *results) {
    Nest<1> kept, reduced;
    int64_t size = 1;
    for (int d = 0; d < x.ndim; ++d) {
        Nest<1> &nest = axes >> d & 1 ? reduced : kept;
        nest.add(x.shape[d], {x.stride[d]});
        size *= axes >> d & 1 ? x.shape[d] : 1;
    }
    kept.base[0] = static_cast<int64_t>(x.data);
    static thread_local Scratch addresses, rows;
    int64_t *starts = addresses.take<int64_t>(groups.count), at = 0;
    walk(kept, [&](const Slab<1> &t) {
        for (int64_t r = 0; r < t.rows; ++r) {
            for (int64_t c = 0; c < t.cols; ++c) {
                starts[at++] = t.at[0] + r * t.row_step[0] + c * t.step[0];
            }
        }
    });
    parallel_for(groups.count, size * item_bytes(x), [&](int64_t begin, int64_t end) {
        float *values = rows.take<float>(size);
        for (int64_t g = begin; g < end; ++g) {
            const float largest = results[g];
            if (!std::isfinite(largest) || largest < 0x1p-126f) {
                results[g] = std::isfinite(largest) ? 0 : largest;
                continue;
            }
            Nest<1> group = reduced;
            group.base[0] = starts[g];
            float *to = values;
            walk(group, [&](const Slab<1> &t) {
                for (int64_t r = 0; r < t.rows; ++r) {
                    const char *p = reinterpret_cast<const char *>(t.at[0] + r * t.row_step[0]);
                    if (t.step[0] == sizeof(T) && !saturates) {
                        map_steps(reinterpret_cast<const T *>(p), reinterpret_cast<F32 *>(to), t.cols,
                                  [](const T *from, F32 *at, int64_t) { put(at, lanes(from), lanes(from + VECTOR)); });
                        to += t.cols;
                        continue;
                    }
                    for (int64_t c = 0; c < t.cols; ++c) {
                        T element = load<T>(p + c * t.step[0]);
                        if (saturates) {
                            element.bits = static_cast<decltype(element.bits)>(saturated<T>(element.bits));
                        }
                        *to++ = widened(element);
                    }
                }
            });
            const int32_t exponent = static_cast<int32_t>(as_bits(largest) >> 23) - 127;
            const int32_t e = exponent > 126 ? 126 : exponent;
            results[g] = tree_norm(values, size, as_float(static_cast<uint32_t>(127 - e) << 23),
                                   as_float(static_cast<uint32_t>(127 + e) << 23));
        }
    });
}

int32_t reduce_norm(const kv_reduce_args &a, uint64_t *status) {
    return with_float(a.x.dtype, [&](auto tag) {
        typedef decltype(tag) T;
        static thread_local Scratch scratch;
        const Groups groups(a.x, a.axes);
        float *results = scratch.take<float>(groups.count);
        const Verdict verdict = absmax<T>(a.x, groups, a.nonfinite, Special::KEEP, results, status);
        if (verdict != Verdict::REFUSED) {
            norms<T>(a.x, groups, a.axes, verdict == Verdict::SPECIAL && a.nonfinite == KV_SATURATE, results);
            write_groups(a.out, -1, results);
        }
        return 0;
    });
}
