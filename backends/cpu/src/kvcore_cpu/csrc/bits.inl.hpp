// pack_bits, unpack_bits, count_symbols. Eight values are a 64-bit word on one side and `bits` bytes on the other.

constexpr int64_t BITS_ROW = 2048; // values that go through buffers at a time: whole bytes, whatever their width
constexpr int64_t COUNTED = 16;    // channels whose histograms are made at once: they stay in the nearest cache

// A word with VALUE at every multiple of FIELD bits.
template <int FIELD, uint64_t VALUE>
constexpr uint64_t REPEATED = FIELD == 64 ? VALUE : ~0ull / ((1ull << FIELD % 64) - 1) * VALUE;

// Two neighbouring fields, of which SIZE bits count, become one field of 2 * SIZE bits; and back.
template <int SIZE, int FIELD> inline uint64_t join(uint64_t x) {
    constexpr uint64_t LOW = REPEATED<2 * FIELD, (1ull << SIZE) - 1>;
    return (x & LOW) | (x >> FIELD & LOW) << SIZE;
}
template <int SIZE, int FIELD> inline uint64_t part(uint64_t x) {
    constexpr uint64_t LOW = REPEATED<2 * FIELD, (1ull << SIZE) - 1>;
    return (x & LOW) | (x >> SIZE & LOW) << FIELD;
}

// The low BITS bits of each byte, side by side; and back.
template <int BITS> inline uint64_t squeeze(uint64_t x) {
#if KVCORE_ISA_AVX2
    return _pext_u64(x, REPEATED<8, (1 << BITS) - 1>);
#else
    return join<4 * BITS, 32>(join<2 * BITS, 16>(join<BITS, 8>(x)));
#endif
}
template <int BITS> inline uint64_t spread(uint64_t x) {
#if KVCORE_ISA_AVX2
    return _pdep_u64(x, REPEATED<8, (1 << BITS) - 1>);
#else
    return part<BITS, 8>(part<2 * BITS, 16>(part<4 * BITS, 32>(x)));
#endif
}

template <int BITS> void pack_row(const uint8_t *in, uint8_t *out, int64_t n) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8, out += BITS) {
        const uint64_t word = squeeze<BITS>(load<uint64_t>(in + i));
        std::memcpy(out, &word, BITS);
    }
    if (i < n) {
        uint64_t last = 0;
        std::memcpy(&last, in + i, n - i);
        const uint64_t word = squeeze<BITS>(last);
        std::memcpy(out, &word, ((n - i) * BITS + 7) / 8);
    }
}

template <int BITS, bool SIGNED> void unpack_row(const uint8_t *in, uint8_t *out, int64_t n) {
    constexpr uint64_t SIGN = REPEATED<8, 1 << (BITS - 1)>, ABOVE = 0xFF & ~((1 << BITS) - 1);
    const auto values = [](uint64_t word) {
        const uint64_t v = spread<BITS>(word);
        return SIGNED ? v | ((v & SIGN) >> (BITS - 1)) * ABOVE : v;
    };
    const uint8_t *const end = in + (n * BITS + 7) / 8;
    int64_t i = 0;
    for (; i + 8 <= n && end - in >= 8; i += 8, in += BITS) {
        store(out + i, values(load<uint64_t>(in)));
    }
    for (; i < n; i += 8, in += BITS) { // eight bytes at `in` would be more than there are
        uint64_t word = 0;
        std::memcpy(&word, in, std::min<int64_t>(BITS, end - in));
        const uint64_t last = values(word);
        std::memcpy(out + i, &last, std::min<int64_t>(8, n - i));
    }
}

// Calls body(width) with the number of bits as a constant.
template <class Body> int32_t with_bits(int32_t bits, Body body) {
    switch (bits) {
    case 1: return body(std::integral_constant<int, 1>{});
    case 2: return body(std::integral_constant<int, 2>{});
    case 3: return body(std::integral_constant<int, 3>{});
    case 4: return body(std::integral_constant<int, 4>{});
    case 5: return body(std::integral_constant<int, 5>{});
    case 6: return body(std::integral_constant<int, 6>{});
    case 7: return body(std::integral_constant<int, 7>{});
    case 8: return body(std::integral_constant<int, 8>{});
    default: return refuse(KV_FAIL_UNSUPPORTED, "values have 1 to 8 bits");
    }
}

inline void copy_strided(const char *from, int64_t from_step, char *to, int64_t to_step, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
        to[i * to_step] = from[i * from_step];
    }
}

// Calls row(in, out, n) for the rows of n values, wide on one side and packed on the other.
template <class Row> void map_packed(const kv_bits_args &a, const kv_array &values, Row row) {
    const int last = values.ndim - 1;
    const int64_t n = values.shape[last], in_step = a.x.stride[last], out_step = a.out.stride[last];
    const bool plain = in_step == 1 && out_step == 1;
    // What BITS_ROW values are on either side.
    const int64_t in_piece = &values == &a.x ? BITS_ROW : BITS_ROW * a.bits / 8;
    const int64_t out_piece = &values == &a.x ? BITS_ROW * a.bits / 8 : BITS_ROW;
    const int64_t in_count = a.x.shape[last], out_count = a.out.shape[last];
    Nest<2> nest;
    nest.base[0] = static_cast<int64_t>(a.x.data);
    nest.base[1] = static_cast<int64_t>(a.out.data);
    for (int d = 0; d < last; ++d) {
        nest.add(a.x.shape[d], {a.x.stride[d], a.out.stride[d]});
    }
    walk_parallel(nest, bytes_of(a.x) + bytes_of(a.out), -1, [&](const Slab<2> &t) {
        for (int64_t i = 0; i < t.rows * t.cols; ++i) {
            const int64_t r = i / t.cols, c = i % t.cols;
            const char *in = reinterpret_cast<const char *>(t.at[0] + r * t.row_step[0] + c * t.step[0]);
            char *out = reinterpret_cast<char *>(t.at[1] + r * t.row_step[1] + c * t.step[1]);
            if (plain) {
                row(reinterpret_cast<const uint8_t *>(in), reinterpret_cast<uint8_t *>(out), n);
                continue;
            }
            for (int64_t from = 0, p = 0; from < n; from += BITS_ROW, ++p) {
                char source[BITS_ROW], target[BITS_ROW];
                const int64_t ins = std::min(in_piece, in_count - p * in_piece);
                const int64_t outs = std::min(out_piece, out_count - p * out_piece);
                copy_strided(in + p * in_piece * in_step, in_step, source, 1, ins);
                row(reinterpret_cast<const uint8_t *>(source), reinterpret_cast<uint8_t *>(target),
                    std::min(BITS_ROW, n - from));
                copy_strided(target, 1, out + p * out_piece * out_step, out_step, outs);
            }
        }
    });
}

// Whether all values fit; reports the first that does not.
template <class Value> bool check_range(const kv_array &x, int32_t bits, uint64_t *status) {
    constexpr bool SIGNED = std::is_signed_v<Value>;
    const int32_t low = SIGNED ? -(1 << (bits - 1)) : 0, high = SIGNED ? (1 << (bits - 1)) - 1 : (1 << bits) - 1;
    bool good = true;
    walk_parallel(nest_of(x), bytes_of(x), -1, [&](const Slab<1> &t) {
        for (int64_t r = 0; r < t.rows; ++r) {
            const Value *p = reinterpret_cast<const Value *>(t.at[0] + r * t.row_step[0]);
            Value least = static_cast<Value>(high), most = static_cast<Value>(low);
            for (int64_t c = 0; c < t.cols && t.step[0] == 1; ++c) {
                least = std::min(least, p[c]);
                most = std::max(most, p[c]);
            }
            for (int64_t c = 0; c < t.cols && t.step[0] != 1; ++c) {
                least = std::min(least, p[c * t.step[0]]);
                most = std::max(most, p[c * t.step[0]]);
            }
            if (least < low || most > high) {
                __atomic_store_n(&good, false, __ATOMIC_RELAXED);
            }
        }
    });
    if (!good) {
        report_first(x, status, [&](const char *p) {
            const Value value = load<Value>(p);
            return value < low || value > high ? KV_RANGE : 0;
        });
    }
    return good;
}

int32_t pack_bits(const kv_bits_args &a, uint64_t *status) {
    const bool good = a.x.dtype == KV_I8 ? check_range<int8_t>(a.x, a.bits, status)
                                         : check_range<uint8_t>(a.x, a.bits, status);
    if (!good) {
        return 0;
    }
    return with_bits(a.bits, [&](auto width) {
        map_packed(a, a.x, pack_row<decltype(width)::value>);
        return 0;
    });
}

int32_t unpack_bits(const kv_bits_args &a, uint64_t *) {
    return with_bits(a.bits, [&](auto width) {
        if (a.out.dtype == KV_I8) {
            map_packed(a, a.out, unpack_row<decltype(width)::value, true>);
        } else {
            map_packed(a, a.out, unpack_row<decltype(width)::value, false>);
        }
        return 0;
    });
}

// Histograms of `channels` columns of T bytes.
inline void count_columns(const char *x, int64_t token_step, int64_t channel_step, int64_t tokens, int64_t channels,
                          uint32_t (&counts)[COUNTED][256]) {
    std::memset(counts, 0, channels * sizeof counts[0]);
    for (int64_t t = 0; t < tokens; ++t, x += token_step) {
        if (channels == COUNTED && channel_step == 1) {
            for (int64_t c = 0; c < COUNTED; ++c) {
                ++counts[c][static_cast<uint8_t>(x[c])];
            }
        } else {
            for (int64_t c = 0; c < channels; ++c) {
                ++counts[c][static_cast<uint8_t>(x[c * channel_step])];
            }
        }
    }
}

int32_t count_symbols(const kv_bits_args &a, uint64_t *) {
    const int lead = a.x.ndim - 2;
    const int64_t tokens = a.x.shape[lead], channels = a.x.shape[lead + 1];
    const int64_t token_step = a.x.stride[lead], channel_step = a.x.stride[lead + 1];
    const int64_t out_channel_step = a.out.stride[lead], symbol_step = a.out.stride[lead + 1];
    const int64_t parts = (channels + COUNTED - 1) / COUNTED;
    Nest<3> nest; // parts of the channels, and the channel at which they begin
    nest.base[0] = static_cast<int64_t>(a.x.data);
    nest.base[1] = static_cast<int64_t>(a.out.data);
    for (int d = 0; d < lead; ++d) {
        nest.add(a.x.shape[d], {a.x.stride[d], a.out.stride[d], 0});
    }
    nest.add(parts, {COUNTED * channel_step, COUNTED * out_channel_step, COUNTED});
    walk_parallel(nest, bytes_of(a.x) + bytes_of(a.out), -1, [&](const Slab<3> &t) {
        uint32_t counts[COUNTED][256];
        for (int64_t i = 0; i < t.rows * t.cols; ++i) {
            const int64_t r = i / t.cols, c = i % t.cols;
            const int64_t first = t.at[2] + r * t.row_step[2] + c * t.step[2];
            const int64_t count = std::min(COUNTED, channels - first);
            const char *x = reinterpret_cast<const char *>(t.at[0] + r * t.row_step[0] + c * t.step[0]);
            char *out = reinterpret_cast<char *>(t.at[1] + r * t.row_step[1] + c * t.step[1]);
            count_columns(x, token_step, channel_step, tokens, count, counts);
            for (int64_t k = 0; k < count; ++k) {
                if (symbol_step == sizeof(uint32_t)) {
                    std::memcpy(out + k * out_channel_step, counts[k], sizeof counts[k]);
                    continue;
                }
                for (int64_t s = 0; s < 256; ++s) {
                    store(out + k * out_channel_step + s * symbol_step, counts[k][s]);
                }
            }
        }
    });
    return 0;
}
