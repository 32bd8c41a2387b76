// reduce_moments: integer sums and sums of squares.

// Rows whose sums stay in the 32-bit lanes of one vector.
constexpr int64_t MOMENT_ROWS = 256;

// x * 2**exponent exactly, where that is of any consequence: as two factors, of which neither under- nor overflows. An
// intermediate that is subnormal ends below one half; one that is infinite would end beyond int16.
struct PowerOfTwo {
    float first, second;

    explicit PowerOfTwo(int32_t exponent) {
        exponent = exponent < -252 ? -252 : exponent > 252 ? 252 : exponent;
        const int32_t half = exponent / 2;
        first = as_float(static_cast<uint32_t>(127 + half) << 23);
        second = as_float(static_cast<uint32_t>(127 + exponent - half) << 23);
    }
    template <class V> V operator()(V x) const { return x * first * second; }
};

// What rounds to an int16; not a NaN.
inline Ints representable(Floats v) { return (v >= -32768.5f) & (v < 32767.5f); }
inline bool representable(float v) { return v >= -32768.5f && v < 32767.5f; }

inline Longs squares_of(Ints v) { return (Longs)((Words)v * (Words)v); } // two to a lane

struct Moments {
    int64_t *sum, *square; // of groups
    bool valid = true;

    void add(float x, PowerOfTwo power, int64_t group) {
        const float v = power(x);
        valid &= representable(v);
        const int64_t i = nearest(all(v))[0];
        sum[group] += i;
        square[group] += i * i;
    }

    // n elements of one group.
    template <class T> void add_row(const T *p, int64_t n, PowerOfTwo power, int64_t group) {
        int64_t done = 0;
        while (n - done >= PAIR) {
            const int64_t end = done + std::min(n - done, MOMENT_ROWS * PAIR) / PAIR * PAIR;
            Ints sums = {}, good = ~Ints{};
            Longs squares = {};
            for (; done < end; done += PAIR) {
                const Floats a = power(lanes(p + done)), b = power(lanes(p + done + VECTOR));
                const Ints i = nearest(a), j = nearest(b);
                good &= representable(a) & representable(b);
                sums += i + j;
                const Longs both = (Longs)((Words)squares_of(i) + (Words)squares_of(j)); // each at most 2**31
                squares += (both & 0xFFFFFFFF) + (both >> 32);
            }
            valid &= !any(~good);
            for (int l = 0; l < VECTOR; ++l) {
                sum[group] += sums[l];
                square[group] += l < VECTOR / 2 ? static_cast<int64_t>(squares[l]) : 0;
            }
        }
        for (; done < n; ++done) {
            add(widened(p[done]), power, group);
        }
    }

    // Up to MOMENT_ROWS rows of n elements, element i of all of them in group + i; a power for each row.
    template <class T>
    void add_columns(const char *p, int64_t row_step, int64_t rows, int64_t n, const PowerOfTwo *powers,
                     int64_t group) {
        Ints good = ~Ints{};
        int64_t c = 0;
        for (; c + VECTOR <= n; c += VECTOR) {
            const char *from = p + c * sizeof(T);
            Ints sums = {};
            Longs even = {}, odd = {};
            for (int64_t r = 0; r < rows; ++r, from += row_step) {
                const Floats v = powers[r](lanes(reinterpret_cast<const T *>(from)));
                const Ints i = nearest(v);
                good &= representable(v);
                sums += i;
                even += squares_of(i) & 0xFFFFFFFF;
                odd += squares_of(i) >> 32;
            }
            for (int l = 0; l < VECTOR; ++l) {
                sum[group + c + l] += sums[l];
                square[group + c + l] += static_cast<int64_t>(l % 2 ? odd[l / 2] : even[l / 2]);
            }
        }
        valid &= !any(~good);
        for (int64_t r = 0; r < rows; ++r) {
            for (int64_t i = c; i < n; ++i) {
                add(widened(load<T>(p + r * row_step + i * sizeof(T))), powers[r], group + i);
            }
        }
    }

    template <class T> void add_slab(const Slab<3> &t) {
        const auto at = [&](int64_t r, int64_t c) {
            return reinterpret_cast<const char *>(t.at[0] + r * t.row_step[0] + c * t.step[0]);
        };
        const auto power = [&](int64_t r, int64_t c) {
            const int64_t exponent = t.at[2] + r * t.row_step[2] + c * t.step[2];
            return PowerOfTwo(load<int32_t>(reinterpret_cast<const void *>(exponent)));
        };
        if (t.step[0] != sizeof(T) || t.step[2] != 0) {
            for (int64_t r = 0; r < t.rows; ++r) {
                for (int64_t c = 0; c < t.cols; ++c) {
                    add(widened(load<T>(at(r, c))), power(r, c), t.at[1] + r * t.row_step[1] + c * t.step[1]);
                }
            }
        } else if (t.step[1] == 0) {
            for (int64_t r = 0; r < t.rows; ++r) {
                add_row(reinterpret_cast<const T *>(at(r, 0)), t.cols, power(r, 0), t.at[1] + r * t.row_step[1]);
            }
        } else {
            const int64_t most = t.row_step[1] == 0 ? MOMENT_ROWS : 1; // rows of one slab in the same groups
            for (int64_t r = 0; r < t.rows; r += most) {
                const int64_t rows = t.rows - r < most ? t.rows - r : most;
                alignas(PowerOfTwo) char memory[MOMENT_ROWS * sizeof(PowerOfTwo)];
                PowerOfTwo *powers = reinterpret_cast<PowerOfTwo *>(memory);
                for (int64_t i = 0; i < rows; ++i) {
                    powers[i] = power(r + i, 0);
                }
                add_columns<T>(at(r, 0), t.row_step[0], rows, t.cols, powers, t.at[1] + r * t.row_step[1]);
            }
        }
    }
};

template <class T> int32_t moments(const kv_reduce_args &a, uint64_t *status) {
    static thread_local Scratch scratch;
    const Groups groups(a.x, a.axes);
    int64_t *sums = scratch.take<int64_t>(2 * groups.count);
    std::fill_n(sums, 2 * groups.count, 0);
    Nest<3> nest;
    nest.base[0] = static_cast<int64_t>(a.x.data);
    nest.base[2] = static_cast<int64_t>(a.exponent.data);
    for (int d = 0; d < a.x.ndim; ++d) {
        const int64_t step = a.exponent.shape[d] == 1 ? 0 : a.exponent.stride[d];
        nest.add(a.x.shape[d], {a.x.stride[d], groups.step[d], step});
    }
    bool valid = true;
    walk_parallel(nest, bytes_of(a.x), 1, [&](const Slab<3> &t) {
        Moments part{sums, sums + groups.count};
        part.add_slab<T>(t);
        if (!part.valid) {
            __atomic_store_n(&valid, false, __ATOMIC_RELAXED);
        }
    });
    if (valid) {
        write_groups(a.out, 0, sums);
        write_groups(a.out, 1, sums + groups.count);
        return 0;
    }
    int64_t i = 0;
    walk(nest, [&](const Slab<3> &t) {
        for (int64_t r = 0; r < t.rows; ++r) {
            for (int64_t c = 0; c < t.cols; ++c, ++i) {
                const float x = widened(load<T>(reinterpret_cast<void *>(t.at[0] + r * t.row_step[0] + c * t.step[0])));
                const void *exponent = reinterpret_cast<void *>(t.at[2] + r * t.row_step[2] + c * t.step[2]);
                if (!representable(PowerOfTwo(load<int32_t>(exponent))(x))) {
                    report(status, i, std::isfinite(x) ? KV_RANGE : KV_NONFINITE);
                }
            }
        }
    });
    return 0;
}

int32_t reduce_moments(const kv_reduce_args &a, uint64_t *status) {
    if (a.x.dtype == KV_I16) {
        return moments<S16>(a, status);
    }
    return with_float(a.x.dtype, [&](auto tag) { return moments<decltype(tag)>(a, status); });
}
