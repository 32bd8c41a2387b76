// shift_rope: two products, one addition, one rounding for each of a pair.

// The table's row of a token, and PAIR zeros more.
struct Angles {
    float *cos, *sin;
    int64_t pairs;
    bool tame; // no pair is to be left as it is, and no result is more than twice the larger of its pair

    void read(const char *c, int64_t cos_step, const char *s, int64_t sin_step) {
        int32_t wild = 0;
        for (int64_t i = 0; i < pairs; ++i) {
            cos[i] = load<float>(c + i * cos_step);
            sin[i] = load<float>(s + i * sin_step);
        }
        for (int64_t i = 0; i < pairs; ++i) {
            wild |= ((cos[i] == 1) & (sin[i] == 0)) | !(std::fabs(cos[i]) <= 1) | !(std::fabs(sin[i]) <= 1);
        }
        tame = wild == 0;
    }
};

// VECTOR pairs: bits of both values in, bits out. CAREFUL: for pairs that stay as they are, for infinities and NaN, and
// where a result may be beyond the type.
template <class In, class Out, bool CAREFUL> inline void turn(Words &x, Words &y, Floats c, Floats s) {
    const Floats a = widen(In{}, x), b = widen(In{}, y);
    const Floats p = a * c - b * s, q = b * c + a * s;
    if constexpr (!CAREFUL) {
        x = rounded(Out{}, p);
        y = rounded(Out{}, q);
        return;
    }
    const Ints special = ((Ints)magnitude(a) >= int32_t{F32::INF}) | ((Ints)magnitude(b) >= int32_t{F32::INF});
    const Ints same = (c == 1.0f) & (s == 0.0f);
    const auto settled = [&](Floats r) { // what overflows from finite values is held; other infinities, and NaN, stay
        const Ints overflow = ((Ints)magnitude(r) == int32_t{F32::INF}) & ~special;
        return narrow_any(Out{}, overflow ? clamp(r, F32::LARGEST) : r);
    };
    const auto plain = [](Words bits, Floats v) { return std::is_same_v<In, Out> ? bits : narrow_any(Out{}, v); };
    x = same ? plain(x, a) : settled(p);
    y = same ? plain(y, b) : settled(q);
}

// --- PAIR pairs of a row. `far`: from the first value of a pair to the second, in elements.

template <class T> inline void read_pairs(const T *p, Words (&x)[2], Words (&y)[2], int64_t far, std::false_type) {
    typedef std::make_unsigned_t<typename T::Bits> Bits;
    for (int k = 0; k < 2; ++k) {
        x[k] = words(Bits{}, p + k * VECTOR);
        y[k] = words(Bits{}, p + far + k * VECTOR);
    }
}

template <class T>
inline void write_pairs(T *p, const Words (&x)[2], const Words (&y)[2], int64_t far, std::false_type) {
    put_bits(p, x[0], x[1]);
    put_bits(p + far, y[0], y[1]);
}

// Interleaved: a pair of 16-bit values is a word; pairs of words are sorted.
template <class T> inline void read_pairs(const T *p, Words (&x)[2], Words (&y)[2], int64_t, std::true_type) {
    for (int k = 0; k < 2; ++k) {
        if constexpr (sizeof(T) == 2) {
            const Words both = load<Words>(p + 2 * k * VECTOR);
            x[k] = both & 0xFFFF;
            y[k] = both >> 16;
        } else {
            const Words low = load<Words>(p + 2 * k * VECTOR), high = load<Words>(p + (2 * k + 1) * VECTOR);
            Ints even;
            for (int l = 0; l < VECTOR; ++l) {
                even[l] = 2 * l;
            }
            x[k] = __builtin_shuffle(low, high, even);
            y[k] = __builtin_shuffle(low, high, even + 1);
        }
    }
}

template <class T>
inline void write_pairs(T *p, const Words (&x)[2], const Words (&y)[2], int64_t, std::true_type) {
    for (int k = 0; k < 2; ++k) {
        if constexpr (sizeof(T) == 2) {
            store(p + 2 * k * VECTOR, x[k] | y[k] << 16);
        } else {
            Ints low, high;
            for (int l = 0; l < VECTOR; ++l) {
                low[l] = l / 2 + l % 2 * VECTOR;
                high[l] = low[l] + VECTOR / 2;
            }
            store(p + 2 * k * VECTOR, __builtin_shuffle(x[k], y[k], low));
            store(p + (2 * k + 1) * VECTOR, __builtin_shuffle(x[k], y[k], high));
        }
    }
}

// One row of `width` channels. `in` and `out` may be the same memory.
template <class In, class Out, bool INTERLEAVED, bool CAREFUL>
void turn_row(const In *in, Out *out, int64_t width, const Angles &angles) {
    constexpr std::bool_constant<INTERLEAVED> ORDER;
    constexpr int64_t EACH = INTERLEAVED ? 2 : 1; // channels from one pair to the next
    const int64_t pairs = angles.pairs;
    const auto turn_pairs = [&](const In *p, Out *q, int64_t far, int64_t i) {
        Words x[2], y[2];
        read_pairs(p, x, y, far, ORDER);
        for (int k = 0; k < 2; ++k) {
            const Floats c = load<Floats>(angles.cos + i + k * VECTOR), s = load<Floats>(angles.sin + i + k * VECTOR);
            turn<In, Out, CAREFUL>(x[k], y[k], c, s);
        }
        write_pairs(q, x, y, far, ORDER);
    };
    int64_t i = 0;
    for (; i + PAIR <= pairs; i += PAIR) {
        turn_pairs(in + i * EACH, out + i * EACH, pairs, i);
    }
    if (const int64_t n = pairs - i; n > 0) {
        In from[2 * PAIR] = {};
        Out to[2 * PAIR];
        std::memcpy(from, in + i * EACH, n * EACH * sizeof(In));
        if (!INTERLEAVED) {
            std::memcpy(from + PAIR, in + pairs + i, n * sizeof(In));
        }
        turn_pairs(from, to, PAIR, i);
        std::memcpy(out + i * EACH, to, n * EACH * sizeof(Out));
        if (!INTERLEAVED) {
            std::memcpy(out + pairs + i, to + PAIR, n * sizeof(Out));
        }
    }
    const int64_t rest = width - 2 * pairs;
    in += 2 * pairs;
    out += 2 * pairs;
    if constexpr (std::is_same_v<In, Out>) {
        if (in != out) {
            std::memcpy(out, in, rest * sizeof(In));
        }
    } else {
        map_steps(in, out, rest, [](const In *p, Out *q, int64_t) {
            put_bits(q, narrow_any(Out{}, lanes(p)), narrow_any(Out{}, lanes(p + VECTOR)));
        });
    }
}

template <class In, class Out> void shift_rows(const kv_rope_args &a) {
    const int last = a.x.ndim - 1;
    const int64_t width = a.x.shape[last], in_step = a.x.stride[last], out_step = a.out.stride[last];
    const bool plain = in_step == sizeof(In) && out_step == sizeof(Out);
    const int64_t pairs = a.cos.shape[1];
    Nest<4> nest; // rows, with the table's
    nest.base[0] = static_cast<int64_t>(a.x.data);
    nest.base[1] = static_cast<int64_t>(a.out.data);
    nest.base[2] = static_cast<int64_t>(a.cos.data);
    nest.base[3] = static_cast<int64_t>(a.sin.data);
    for (int d = 0; d < last; ++d) {
        const int64_t along_table = d == last - 2;
        nest.add(a.x.shape[d],
                 {a.x.stride[d], a.out.stride[d], along_table * a.cos.stride[0], along_table * a.sin.stride[0]});
    }
    const auto turn_it = [&](const In *in, Out *out, const Angles &angles) {
        typename In::Bits largest[1] = {0};
        fold_strided<Largest<In, Special::KEEP>>(reinterpret_cast<const char *>(in), sizeof(In), 2 * pairs, largest);
        const bool careful = !angles.tame || !(result_of<In>(largest[0]) < Out::LARGEST / 2);
        const auto row = a.interleaved ? careful ? turn_row<In, Out, true, true> : turn_row<In, Out, true, false>
                         : careful     ? turn_row<In, Out, false, true>
                                       : turn_row<In, Out, false, false>;
        row(in, out, width, angles);
    };
    walk_parallel(nest, bytes_of(a.x) + bytes_of(a.out), -1, [&](const Slab<4> &t) {
        static thread_local Scratch table, from, to;
        float *cos = table.take<float>(2 * (pairs + PAIR));
        std::fill_n(cos, 2 * (pairs + PAIR), 0.0f);
        Angles angles = {cos, cos + pairs + PAIR, pairs, false};
        In *row = plain ? nullptr : from.take<In>(width);
        Out *turned = plain ? nullptr : to.take<Out>(width);
        int64_t cos_read = 0, sin_read = 0; // addresses
        for (int64_t i = 0; i < t.rows * t.cols; ++i) {
            const int64_t r = i / t.cols, c = i % t.cols;
            const auto at = [&](int k) { return t.at[k] + r * t.row_step[k] + c * t.step[k]; };
            const char *in = reinterpret_cast<const char *>(at(0));
            char *out = reinterpret_cast<char *>(at(1));
            if (i == 0 || at(2) != cos_read || at(3) != sin_read) {
                cos_read = at(2);
                sin_read = at(3);
                angles.read(reinterpret_cast<const char *>(cos_read), a.cos.stride[1],
                            reinterpret_cast<const char *>(sin_read), a.sin.stride[1]);
            }
            if (plain) {
                turn_it(reinterpret_cast<const In *>(in), reinterpret_cast<Out *>(out), angles);
                continue;
            }
            for (int64_t k = 0; k < width; ++k) {
                row[k] = load<In>(in + k * in_step);
            }
            turn_it(row, turned, angles);
            for (int64_t k = 0; k < width; ++k) {
                store(out + k * out_step, turned[k]);
            }
        }
    });
}

int32_t shift_rope(const kv_rope_args &a, uint64_t *) {
    return with_float(a.x.dtype, [&](auto in) {
        return with_float(a.out.dtype, [&](auto out) {
            shift_rows<decltype(in), decltype(out)>(a);
            return 0;
        });
    });
}
