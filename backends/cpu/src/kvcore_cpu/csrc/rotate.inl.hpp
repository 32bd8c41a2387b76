// rotate: a Hadamard matrix over blocks of channels, with signs that seed and channel give.

constexpr int32_t ROTATE_BLOCK = 1024; // the largest

// Magnitudes beyond 2**100, as bits; fp16 has none save those that are not finite.
template <class T> constexpr uint32_t ROTATE_LIMIT = F32::INF;
template <> constexpr uint32_t ROTATE_LIMIT<F32> = 0x71800000;
template <> constexpr uint32_t ROTATE_LIMIT<BF16> = 0x7180;
template <> constexpr uint32_t ROTATE_LIMIT<F16> = F16::INF - 1;

// Sign bits of channels, PAIR more than there are.
inline void rotation_signs(uint64_t seed, int64_t channels, uint32_t *signs) {
    for (int64_t c = 0; c < channels + PAIR; ++c) {
        signs[c] = static_cast<uint32_t>(mix(seed + static_cast<uint64_t>(c + 1) * GOLDEN) >> 32) & 0x80000000;
    }
}

// The butterflies within a vector, at distances H, 2 * H ... below LIMIT.
template <int H, int LIMIT> inline Floats near_butterflies(Floats v) {
    if constexpr (H < LIMIT) {
        Ints partner;
        Words flip; // the sign of b: a - b = -b + a
        for (int l = 0; l < VECTOR; ++l) {
            partner[l] = l ^ H;
            flip[l] = l & H ? 0x80000000 : 0;
        }
        return near_butterflies<2 * H, LIMIT>((Floats)((Words)v ^ flip) + __builtin_shuffle(v, partner));
    } else {
        return v;
    }
}

// All butterflies of a block: (a, b) -> (a + b, a - b) at distances 1, 2, 4 ...
inline void butterflies(float *v, int32_t block) {
    const auto within = [&](auto near) {
        for (int32_t i = 0; i < block; i += VECTOR) { // in a shorter block, more than it has, which does no harm
            store(v + i, near(load<Floats>(v + i)));
        }
    };
    switch (std::min<int32_t>(block, VECTOR)) {
    case 1: break;
    case 2: within(near_butterflies<1, 2>); break;
    case 4: within(near_butterflies<1, 4>); break;
    default: within(near_butterflies<1, VECTOR>);
    }
    int32_t h = VECTOR;
    for (; 2 * h < block; h *= 4) { // two distances in one pass
        for (int32_t i = 0; i < block; i += 4 * h) {
            for (int32_t k = i; k < i + h; k += VECTOR) {
                const Floats a = load<Floats>(v + k), b = load<Floats>(v + k + h);
                const Floats c = load<Floats>(v + k + 2 * h), d = load<Floats>(v + k + 3 * h);
                const Floats e = a + b, f = a - b, g = c + d, j = c - d;
                store(v + k, e + g);
                store(v + k + h, f + j);
                store(v + k + 2 * h, e - g);
                store(v + k + 3 * h, f - j);
            }
        }
    }
    for (int32_t k = 0; h < block && k < h; k += VECTOR) {
        const Floats a = load<Floats>(v + k), b = load<Floats>(v + k + h);
        store(v + k, a + b);
        store(v + k + h, a - b);
    }
}

// One block; `signs` are those of its channels.
template <class In, class Out>
void rotate_block(const In *in, Out *out, int32_t block, float factor, bool inverse, const uint32_t *signs) {
    alignas(64) float v[ROTATE_BLOCK + PAIR];
    const Words before = inverse ? Words{} : ~Words{}, after = ~before;
    const auto sign = [&](int64_t i, Words wanted) { return load<Words>(signs + i) & wanted; };
    map_steps(in, reinterpret_cast<F32 *>(v), block, [&](const In *p, F32 *q, int64_t i) {
        const auto signed_value = [&](const In *from, int64_t at) {
            const Floats x = lanes(from);
            const Floats kept = (Ints)magnitude(x) < (Ints)all(0x1p-90f) ? Floats{} : x;
            return (Words)kept ^ sign(at, before);
        };
        put_bits(q, signed_value(p, i), signed_value(p + VECTOR, i + VECTOR));
    });
    butterflies(v, block);
    map_steps(reinterpret_cast<const F32 *>(v), out, block, [&](const F32 *p, Out *q, int64_t i) {
        const Floats x = lanes(p) * factor, y = lanes(p + VECTOR) * factor;
        put(q, (Floats)((Words)x ^ sign(i, after)), (Floats)((Words)y ^ sign(i + VECTOR, after)));
    });
}

template <class In, class Out> void rotate_rows(const kv_rotate_args &a, const uint32_t *signs) {
    const float factor = static_cast<float>(1 / std::sqrt(static_cast<double>(a.block)));
    const int last = a.x.ndim - 1;
    const int64_t blocks = a.x.shape[last] / a.block;
    const int64_t in_step = a.x.stride[last], out_step = a.out.stride[last];
    const bool plain = in_step == sizeof(In) && out_step == sizeof(Out);
    Nest<3> nest; // blocks, and the channels at which they begin
    nest.base[0] = static_cast<int64_t>(a.x.data);
    nest.base[1] = static_cast<int64_t>(a.out.data);
    for (int d = 0; d < last; ++d) {
        nest.add(a.x.shape[d], {a.x.stride[d], a.out.stride[d], 0});
    }
    nest.add(blocks, {a.block * in_step, a.block * out_step, a.block});
    walk_parallel(nest, bytes_of(a.x) + bytes_of(a.out), -1, [&](const Slab<3> &t) {
        for (int64_t i = 0; i < t.rows * t.cols; ++i) {
            const int64_t r = i / t.cols, c = i % t.cols;
            const char *in = reinterpret_cast<const char *>(t.at[0] + r * t.row_step[0] + c * t.step[0]);
            char *out = reinterpret_cast<char *>(t.at[1] + r * t.row_step[1] + c * t.step[1]);
            const uint32_t *own = signs + t.at[2] + r * t.row_step[2] + c * t.step[2];
            if (plain) {
                rotate_block(reinterpret_cast<const In *>(in), reinterpret_cast<Out *>(out), a.block, factor,
                             a.inverse != 0, own);
                continue;
            }
            In from[ROTATE_BLOCK];
            Out to[ROTATE_BLOCK];
            for (int32_t k = 0; k < a.block; ++k) {
                from[k] = load<In>(in + k * in_step);
            }
            rotate_block(from, to, a.block, factor, a.inverse != 0, own);
            for (int32_t k = 0; k < a.block; ++k) {
                store(out + k * out_step, to[k]);
            }
        }
    });
}

// Whether all of x may be rotated.
template <class T> bool check_rotatable(const kv_array &x, uint64_t *status) {
    typedef typename T::Bits Bits;
    constexpr Bits LIMIT = (Bits)ROTATE_LIMIT<T>;
    bool good = true;
    walk_parallel(nest_of(x), bytes_of(x), -1, [&](const Slab<1> &t) {
        for (int64_t r = 0; r < t.rows; ++r) {
            Bits largest[1] = {0};
            fold_strided<Largest<T, Special::KEEP>>(
                reinterpret_cast<const char *>(t.at[0] + r * t.row_step[0]), t.step[0], t.cols, largest);
            if (largest[0] > LIMIT) {
                __atomic_store_n(&good, false, __ATOMIC_RELAXED);
            }
        }
    });
    if (!good) {
        report_first(x, status, [](const char *p) {
            const Bits size = load<Bits>(p) & MAGNITUDE<T>;
            return size >= (Bits)T::INF ? KV_NONFINITE : size > LIMIT ? KV_RANGE : 0;
        });
    }
    return good;
}

int32_t rotate(const kv_rotate_args &a, uint64_t *status) {
    return with_float(a.x.dtype, [&](auto in) {
        if (count_of(a.x) == 0 || !check_rotatable<decltype(in)>(a.x, status)) {
            return 0;
        }
        static thread_local Scratch scratch;
        const int64_t channels = a.x.shape[a.x.ndim - 1];
        uint32_t *signs = scratch.take<uint32_t>(channels + PAIR);
        rotation_signs(a.seed, channels, signs);
        return with_float(a.out.dtype, [&](auto out) {
            rotate_rows<decltype(in), decltype(out)>(a, signs);
            return 0;
        });
    });
}
