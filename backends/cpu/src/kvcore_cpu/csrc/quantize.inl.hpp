// quantize, dequantize: integers, affine integers, 8-bit floats, codebooks.

constexpr float SCALE_MIN = 0x1p-100f, SCALE_MAX = 0x1p125f;
constexpr int64_t BUFFERED = 256; // elements of a row that go through buffers at a time: a multiple of PAIR

// What turns values of a group into codes or back; each array has PAIR elements more than there are groups.
struct Scales {
    float *factor;   // 1 / scale for quantize, scale for dequantize
    int32_t *zero;   // affine
    const float *levels; // codebook: of dequantize 256 levels, of quantize the middles between them
    int32_t level_count;

    // The values of the groups of VECTOR neighbours: one for all, or the ones from i on.
    template <bool SHARED> static Floats of(const float *values, int64_t i) {
        if constexpr (SHARED) {
            return all(values[0]);
        } else {
            return load<Floats>(values + i);
        }
    }
    template <bool SHARED> static Ints of(const int32_t *values, int64_t i) {
        if constexpr (SHARED) {
            return Ints{} + values[0];
        } else {
            return load<Ints>(values + i);
        }
    }
    Scales from(int64_t group) const { return {factor + group, zero ? zero + group : nullptr, levels, level_count}; }
};

// Memory for the factors and zeros of groups.
inline Scales take_scales(const Groups &groups) {
    static thread_local Scratch factors, zeros;
    Scales s = {factors.take<float>(groups.count + PAIR), zeros.take<int32_t>(groups.count + PAIR), nullptr, 0};
    std::fill_n(s.factor + groups.count, PAIR, 1.0f);
    std::fill_n(s.zero + groups.count, PAIR, 0);
    return s;
}

// The position of a group's first element.
inline int64_t first_element(const kv_array &a, uint32_t axes, int64_t group) {
    int64_t position = 0, step = 1;
    for (int d = a.ndim - 1; d >= 0; --d) {
        if (!(axes >> d & 1)) {
            position += group % a.shape[d] * step;
            group /= a.shape[d];
        }
        step *= a.shape[d];
    }
    return position;
}

// Reads scales [groups] of elements of `whole`, and reports the first that is out of range.
inline bool read_scales(const kv_array &scale, const kv_array &whole, uint32_t axes, float *to, uint64_t *status) {
    int64_t bad = -1;
    each_element(scale, [&](const char *p, int64_t g) {
        to[g] = load<float>(p);
        if (!(to[g] >= SCALE_MIN && to[g] <= SCALE_MAX) && bad < 0) {
            bad = g;
        }
    });
    if (bad >= 0) {
        report(status, first_element(whole, axes, bad), KV_SCALE);
    }
    return bad < 0;
}

// Calls row(in, out, n, scales, shared) for contiguous pieces of rows; `shared` tells whether they are in one group.
// What is strided goes through buffers, and so does all unless `direct`: prepare(piece, n) rewrites what was read,
// finish(from, step, out, n) what was made of it.
template <class In, class Out, class Row, class Prepare, class Finish>
void map_groups(const kv_array &in, const kv_array &out, const Groups &groups, const Scales &scales, bool direct,
                Row row, Prepare prepare, Finish finish) {
    Nest<3> nest;
    nest.base[0] = static_cast<int64_t>(in.data);
    nest.base[1] = static_cast<int64_t>(out.data);
    for (int d = 0; d < in.ndim; ++d) {
        nest.add(in.shape[d], {in.stride[d], out.stride[d], groups.step[d]});
    }
    walk_parallel(nest, bytes_of(in) + bytes_of(out), -1, [&](const Slab<3> &t) {
        const bool shared = t.step[2] == 0;
        const bool plain = direct && t.step[0] == sizeof(In) && t.step[1] == sizeof(Out);
        for (int64_t r = 0; r < t.rows; ++r) {
            const char *from = reinterpret_cast<const char *>(t.at[0] + r * t.row_step[0]);
            char *to = reinterpret_cast<char *>(t.at[1] + r * t.row_step[1]);
            const Scales own = scales.from(t.at[2] + r * t.row_step[2]);
            if (plain) {
                row(reinterpret_cast<const In *>(from), reinterpret_cast<Out *>(to), t.cols, own, shared);
                continue;
            }
            for (int64_t c = 0; c < t.cols; c += BUFFERED) {
                const int64_t n = std::min(BUFFERED, t.cols - c);
                In piece[BUFFERED];
                Out result[BUFFERED];
                for (int64_t i = 0; i < n; ++i) {
                    piece[i] = load<In>(from + (c + i) * t.step[0]);
                }
                prepare(piece, n);
                row(static_cast<const In *>(piece), static_cast<Out *>(result), n, own.from(c * t.step[2]), shared);
                finish(from + c * t.step[0], t.step[0], result, n);
                for (int64_t i = 0; i < n; ++i) {
                    store(to + (c + i) * t.step[1], result[i]);
                }
            }
        }
    });
}

// --- quantize

// Codes of scaled values, by kind; `s` and `i` tell the group.
struct ToInt {
    float limit;
    template <bool SHARED> Ints code(Floats v, const Scales &, int64_t) const { return nearest(clamp(v, limit)); }
};
struct ToAffine {
    int32_t limit;
    template <bool SHARED> Ints code(Floats v, const Scales &s, int64_t i) const {
        const Ints code = nearest(v) + Scales::of<SHARED>(s.zero, i); // |v| is at most about 2**20
        const Ints low = code < 0 ? Ints{} : code;
        return low > limit ? Ints{} + limit : low;
    }
};
struct ToFloat8 {
    template <bool SHARED> Floats code(Floats v, const Scales &, int64_t) const { return v; }
};
struct ToCodebook {
    template <bool SHARED> Ints code(Floats v, const Scales &s, int64_t) const {
        v = (Ints)magnitude(v) < (Ints)all(0x1p-30f) ? Floats{} : v;
        Ints above = {};
        if (s.level_count <= 32) {
            for (int32_t i = 0; i < s.level_count - 1; ++i) {
                above -= (Ints)(v > s.levels[i]);
            }
            return above;
        }
        for (int l = 0; l < VECTOR; ++l) { // 256 middles, infinite beyond the last
            int32_t at = 0;
            for (int32_t step = 128; step > 0; step /= 2) {
                at += v[l] > s.levels[at + step - 1] ? step : 0;
            }
            above[l] = at;
        }
        return above;
    }
};

// Infinities and NaN by policy "propagate", in place of what the finite values that stood in for them gave.
template <class T, class Code> inline void propagate(const char *from, int64_t step, Code *codes, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
        const typename T::Bits bits = load<typename T::Bits>(from + i * step);
        const uint32_t size = static_cast<uint32_t>(bits & MAGNITUDE<T>);
        if (size < T::INF) {
            continue;
        }
        if constexpr (std::is_same_v<Code, E4M3>) {
            codes[i].bits = 0x7F;
        } else if constexpr (std::is_same_v<Code, E5M2>) {
            codes[i].bits = size > T::INF ? 0x7E : bits < 0 ? 0xFC : 0x7C;
        }
    }
}

template <class T, class Code, class Op>
void encode(const kv_quant_args &a, const Groups &groups, const Scales &scales, Verdict verdict, Op op) {
    const auto row = [&](const T *in, Code *out, int64_t n, Scales s, bool shared) {
        const auto each = [&](auto shared_by_all) {
            constexpr bool SHARED = decltype(shared_by_all)::value;
            map_steps(in, out, n, [&](const T *p, Code *q, int64_t i) {
                const Floats v = lanes(p) * Scales::of<SHARED>(s.factor, i);
                const Floats w = lanes(p + VECTOR) * Scales::of<SHARED>(s.factor, i + VECTOR);
                put(q, op.template code<SHARED>(v, s, i), op.template code<SHARED>(w, s, i + VECTOR));
            });
        };
        if (shared) {
            each(std::true_type{});
        } else {
            each(std::false_type{});
        }
    };
    const auto prepare = [&](T *piece, int64_t n) {
        for (int64_t i = 0; i < n && verdict == Verdict::SPECIAL; ++i) {
            piece[i].bits = static_cast<decltype(piece[i].bits)>(saturated<T>(piece[i].bits));
        }
    };
    const auto finish = [&](const char *from, int64_t step, Code *codes, int64_t n) {
        if (verdict == Verdict::SPECIAL && a.nonfinite == KV_PROPAGATE) {
            propagate<T>(from, step, codes, n);
        }
    };
    map_groups<T, Code>(a.x, a.codes, groups, scales, verdict == Verdict::FINITE, row, prepare, finish);
}

// Scales of groups from their largest magnitude, or for kind affine their smallest and largest value.
inline void choose_scales(const kv_quant_args &a, int64_t groups, const float *low, const float *high, float *scale) {
    const float reciprocal = 1.0f / a.code_max;
    for (int64_t g = 0; g < groups; ++g) {
        float s = high[g] * reciprocal;
        if (a.kind == KV_AFFINE) {
            const float largest = std::max(std::fabs(low[g]), std::fabs(high[g]));
            s = std::max(s - low[g] * reciprocal, largest * 0x1p-20f);
        }
        scale[g] = s < SCALE_MIN ? 1.0f : std::min(s, SCALE_MAX);
    }
}

template <class T> int32_t quantize_floats(const kv_quant_args &a, uint64_t *status) {
    const Groups groups(a.x, a.axes);
    Scales s = take_scales(groups);
    static thread_local Scratch scratch;
    float *scale = scratch.take<float>(3 * groups.count), *low = scale + groups.count, *high = low + groups.count;
    const Verdict verdict = a.kind == KV_AFFINE ? minmax<T>(a.x, groups, a.nonfinite, low, high, status)
                                                : absmax<T>(a.x, groups, a.nonfinite, Special::DROP, high, status);
    const bool usable = a.given.data == 0 || read_scales(a.given, a.x, a.axes, scale, status);
    if (verdict == Verdict::REFUSED || !usable) {
        return 0;
    }
    if (a.given.data == 0) {
        choose_scales(a, groups.count, low, high, scale);
    }
    for (int64_t g = 0; g < groups.count; ++g) {
        s.factor[g] = 1.0f / scale[g];
    }
    switch (a.kind) {
    case KV_INT:
        if (a.bits == 16) {
            encode<T, S16>(a, groups, s, verdict, ToInt{a.code_max});
        } else {
            encode<T, S8>(a, groups, s, verdict, ToInt{a.code_max});
        }
        break;
    case KV_AFFINE:
        for (int64_t g = 0; g < groups.count; ++g) {
            s.zero[g] = -static_cast<int32_t>(std::nearbyint(low[g] * s.factor[g]));
        }
        encode<T, U8>(a, groups, s, verdict, ToAffine{static_cast<int32_t>(a.code_max)});
        write_groups(a.zero, -1, s.zero);
        break;
    case KV_FP8:
        if (a.codes.dtype == KV_E4M3) {
            encode<T, E4M3>(a, groups, s, verdict, ToFloat8{});
        } else {
            encode<T, E5M2>(a, groups, s, verdict, ToFloat8{});
        }
        break;
    default: {
        float middles[256];
        std::fill_n(middles, 256, std::numeric_limits<float>::infinity());
        for (int32_t i = 0; i + 1 < a.level_count; ++i) {
            middles[i] = (a.levels[i] + a.levels[i + 1]) * 0.5f;
        }
        s.levels = middles;
        s.level_count = a.level_count;
        encode<T, U8>(a, groups, s, verdict, ToCodebook{});
    }
    }
    write_groups(a.scale, -1, scale);
    return 0;
}

int32_t quantize(const kv_quant_args &a, uint64_t *status) {
    return with_float(a.x.dtype, [&](auto tag) { return quantize_floats<decltype(tag)>(a, status); });
}

// --- dequantize

// Values at scale 1, by kind.
struct Plain {
    template <bool SHARED, class Code> Floats value(const Code *p, const Scales &, int64_t) const { return lanes(p); }
};
struct FromAffine {
    template <bool SHARED> Floats value(const U8 *p, const Scales &s, int64_t i) const {
        const Words code = words(uint8_t{}, p);
        return __builtin_convertvector((Ints)(code - (Words)Scales::of<SHARED>(s.zero, i)), Floats);
    }
};
struct FromCodebook {
    template <bool SHARED> Floats value(const U8 *p, const Scales &s, int64_t) const {
        Floats v;
        for (int l = 0; l < VECTOR; ++l) {
            v[l] = s.levels[p[l].bits];
        }
        return v;
    }
};

template <class Code> constexpr bool IS_FLOAT8 = std::is_same_v<Code, E4M3> || std::is_same_v<Code, E5M2>;

// The bits of a scaled value; a code that is infinite or NaN gives that of the output's type.
template <class Code, class T> inline Words narrow_code(Floats value, Floats scaled) {
    if constexpr (std::is_same_v<Code, E4M3>) {
        return (Ints)magnitude(value) == (Ints)all(480.0f) ? Words{} + T::NAN_BITS : narrow(T{}, scaled);
    } else {
        return (Ints)magnitude(value) >= int32_t{F32::INF} ? narrow_any(T{}, value) : narrow(T{}, scaled);
    }
}

template <class Code, class T, class Op>
void decode(const kv_quant_args &a, const Groups &groups, const Scales &scales, Op op) {
    const auto row = [&](const Code *in, T *out, int64_t n, Scales s, bool shared) {
        const auto each = [&](auto shared_by_all) {
            constexpr bool SHARED = decltype(shared_by_all)::value;
            map_steps(in, out, n, [&](const Code *p, T *q, int64_t i) {
                const Floats v = op.template value<SHARED>(p, s, i);
                const Floats w = op.template value<SHARED>(p + VECTOR, s, i + VECTOR);
                const Floats x = v * Scales::of<SHARED>(s.factor, i), y = w * Scales::of<SHARED>(s.factor, i + VECTOR);
                if constexpr (IS_FLOAT8<Code>) {
                    if (has_special(p)) {
                        put_bits(q, narrow_code<Code, T>(v, x), narrow_code<Code, T>(w, y));
                        return;
                    }
                }
                put(q, x, y);
            });
        };
        if (shared) {
            each(std::true_type{});
        } else {
            each(std::false_type{});
        }
    };
    const auto nothing = [](auto...) {};
    map_groups<Code, T>(a.codes, a.x, groups, scales, true, row, nothing, nothing);
}

// Reports codes that have no level.
inline bool check_codes(const kv_quant_args &a, uint64_t *status) {
    const int32_t count = a.level_count;
    bool good = true;
    each_element(a.codes, [&](const char *p, int64_t) { good &= load<uint8_t>(p) < count; });
    if (!good) {
        report_first(a.codes, status, [&](const char *p) { return load<uint8_t>(p) < count ? 0 : KV_LEVEL; });
    }
    return good;
}

template <class T> int32_t dequantize_to(const kv_quant_args &a, uint64_t *status) {
    const Groups groups(a.codes, a.axes);
    Scales s = take_scales(groups);
    const bool usable = read_scales(a.scale, a.codes, a.axes, s.factor, status);
    if ((a.kind == KV_CODEBOOK && a.level_count < 256 && !check_codes(a, status)) || !usable) {
        return 0;
    }
    switch (a.kind) {
    case KV_INT:
        if (a.bits == 16) {
            decode<S16, T>(a, groups, s, Plain{});
        } else {
            decode<S8, T>(a, groups, s, Plain{});
        }
        break;
    case KV_AFFINE:
        each_element(a.zero, [&](const char *p, int64_t g) { s.zero[g] = load<int32_t>(p); });
        decode<U8, T>(a, groups, s, FromAffine{});
        break;
    case KV_FP8:
        if (a.codes.dtype == KV_E4M3) {
            decode<E4M3, T>(a, groups, s, Plain{});
        } else {
            decode<E5M2, T>(a, groups, s, Plain{});
        }
        break;
    default: {
        float levels[256] = {};
        std::copy_n(a.levels, a.level_count, levels);
        s.levels = levels;
        decode<U8, T>(a, groups, s, FromCodebook{});
    }
    }
    return 0;
}

int32_t dequantize(const kv_quant_args &a, uint64_t *status) {
    return with_float(a.x.dtype, [&](auto tag) { return dequantize_to<decltype(tag)>(a, status); });
}
