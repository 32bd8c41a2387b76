// decode_symbols: every check before anything is believed; nothing outside a tile is read or written.

// Symbols to values; what is escaped comes out as nonsense. `offsets` are those of the tile, or zeros.
void symbol_values(int kind, const uint8_t *symbols, int width, const uint8_t *classes, const int8_t *offsets,
                   int16_t *values) {
    if (kind == KV_INTEGER) {
        for (int c = 0; c < width; ++c) {
            values[c] = static_cast<int16_t>(symbols[c] + static_cast<int16_t>(offsets[c] - ZERO));
        }
    } else if (kind == KV_EXPONENT) {
        for (int c = 0; c < width; ++c) {
            const int z = (symbols[c] - 1) >> 1, minority = (symbols[c] - 1) & 1;
            const int sign = minority ^ (classes[c] >> 7);
            values[c] = static_cast<int16_t>(sign << 8 | ((static_cast<uint8_t>(offsets[c]) - z) & 0xFF));
        }
    } else {
        for (int c = 0; c < width; ++c) {
            const int k = symbols[c] - ZERO;
            values[c] = static_cast<int16_t>(symbols[c] == 1 ? 0x80 : k < 0 ? 0x80 | -k : k);
        }
    }
}

// What decoding of a tile has to say: 0, or a KV_TILE_ code.
using TileCode = int;

bool any_set(const uint8_t *bytes, size_t count) {
    uint8_t all = 0;
    for (size_t i = 0; i < count; ++i) {
        all |= bytes[i];
    }
    return all != 0;
}

// Class bytes: kind exponent has the majority in bit 7.
bool class_beyond(const Tables &tables, const uint8_t *classes, int width) {
    uint8_t all = 0;
    for (int c = 0; c < width; ++c) {
        all |= classes[c];
    }
    return all & (tables.kind == KV_EXPONENT ? 0x60 : 0xE0);
}

// Where a tile goes, and its shape.
struct Target {
    int16_t *at;
    ptrdiff_t step;
    int tokens, width;

    int16_t *row(int token) const { return at + token * step; }
};

TileCode decode_constant(const Tables &tables, const uint8_t *data, size_t nbytes, bool use_offsets,
                         const Target &out, TileScratch &scratch) {
    const size_t width = static_cast<size_t>(out.width);
    const uint8_t *at = data;
    std::memset(scratch.classes, 0, sizeof scratch.classes);
    std::memset(scratch.offsets, 0, sizeof scratch.offsets);
    if (tables.kind == KV_EXPONENT) {
        std::memcpy(scratch.classes, at, width);
        at += width;
    }
    if (has_side_bytes(tables, use_offsets)) {
        std::memcpy(scratch.offsets, at, width);
        at += width;
    }
    if (class_beyond(tables, scratch.classes, out.width)) {
        return KV_TILE_CLASS;
    }
    if (*at == ESC) {
        return KV_TILE_VALUE;
    }
    if (any_set(at + 1, static_cast<size_t>(data + nbytes - (at + 1)))) {
        return KV_TILE_PADDING;
    }
    uint8_t symbols[TILE_CHANNELS];
    std::memset(symbols, *at, sizeof symbols);
    for (int t = 0; t < out.tokens; ++t) {
        symbol_values(tables.kind, symbols, out.width, scratch.classes, scratch.offsets, out.row(t));
    }
    return 0;
}

TileCode decode_packed(const uint8_t *data, size_t nbytes, int words, const Target &out, TileScratch &scratch) {
    const int least = load<int16_t>(data), bits = data[2];
    const int64_t used = int64_t{out.tokens} * out.width * bits;
    if (bits > 16 || (used + 15) / 16 != words) {
        return KV_TILE_SIZE;
    }
    if (data[3] != 0) {
        return KV_TILE_PADDING;
    }
    // A copy with room behind it: values are taken from 32 bits at their byte.
    uint8_t *bytes = reinterpret_cast<uint8_t *>(scratch.words);
    std::memcpy(bytes, data + 4, nbytes - 4);
    std::memset(bytes + nbytes - 4, 0, 8);
    const size_t whole = static_cast<size_t>(used / 8);
    if (used % 8 != 0 && bytes[whole] >> used % 8 != 0) {
        return KV_TILE_PADDING;
    }
    const size_t filled = whole + (used % 8 != 0);
    if (any_set(bytes + filled, nbytes - 4 - filled)) {
        return KV_TILE_PADDING;
    }
    const uint32_t mask = (1u << bits) - 1;
    int most = least;
    size_t bit = 0;
    for (int t = 0; t < out.tokens; ++t) {
        int16_t *row = out.row(t);
        for (int c = 0; c < out.width; ++c, bit += static_cast<size_t>(bits)) {
            const int value = least + static_cast<int>(load<uint32_t>(bytes + bit / 8) >> bit % 8 & mask);
            most = std::max(most, value);
            row[c] = static_cast<int16_t>(value);
        }
    }
    return most > INT16_MAX ? KV_TILE_VALUE : 0;
}

// Takes a tile of mode rANS apart into the scratch memory.
TileCode open_stream(const Tables &tables, const uint8_t *data, int words, bool use_offsets, int channels,
                     TileScratch &scratch) {
    const size_t width = static_cast<size_t>(channels);
    const int lanes = std::min(LANES, channels);
    const uint8_t *at = data;
    std::memcpy(scratch.classes, at, width);
    at += width;
    std::memset(scratch.offsets, 0, sizeof scratch.offsets);
    if (has_side_bytes(tables, use_offsets)) {
        std::memcpy(scratch.offsets, at, width);
        at += width;
    }
    const size_t padding = round_up(static_cast<size_t>(at - data), 4) - static_cast<size_t>(at - data);
    bool padded = any_set(at, padding);
    at += padding;
    bool wrong = false;
    std::memcpy(scratch.states, at, 4 * static_cast<size_t>(lanes));
    for (int l = 0; l < lanes; ++l) {
        wrong |= scratch.states[l] < LOW || scratch.states[l] >> 31 != 0;
    }
    at += 4 * lanes;
    std::memcpy(scratch.words, at, 2 * static_cast<size_t>(words));
    std::memset(scratch.words + words, 0, 2 * (TOKEN_WORDS + 8));
    padded |= words % 2 != 0 && any_set(at + 2 * words, 2);
    if (class_beyond(tables, scratch.classes, channels)) {
        return KV_TILE_CLASS;
    }
    return wrong ? KV_TILE_STATE : padded ? KV_TILE_PADDING : 0;
}

// Turns what was decoded into values, if it ends as it must.
TileCode close_stream(const RansStream &in, const Read &read, const Target &out, TileScratch &scratch) {
    if (read.words != in.words) {
        return KV_TILE_WORDS;
    }
    for (int l = 0; l < std::min(LANES, in.width); ++l) {
        if (scratch.states[l] != LOW) {
            return KV_TILE_STATE;
        }
    }
    for (int t = 0; t < out.tokens; ++t) {
        symbol_values(in.tables.kind, scratch.symbols + t * TILE_CHANNELS, out.width, scratch.classes,
                      scratch.offsets, out.row(t));
    }
    for (int i = 0; i < read.escapes; ++i) {
        const Escape &escape = scratch.escapes[i];
        out.row(escape.place / TILE_CHANNELS)[escape.place % TILE_CHANNELS] = escape.value;
    }
    return 0;
}

// A tile to decode. Its values go to `at`, or if that is null into scratch memory, rows of TILE_CHANNELS.
struct TileRequest {
    const uint8_t *data;
    size_t room; // bytes that are there
    int mode, words;
    int tokens, width;
    int16_t *at;
    ptrdiff_t step;
};

// Decodes tiles, those of mode rANS two at a time; calls done(tag, code, target) for each, sooner or later.
template <class Tag, class Done> class TileDecoder {
  public:
    TileDecoder(const Tables &tables, bool use_offsets, Done done)
        : tables_(tables), use_offsets_(use_offsets), done_(done), scratch_(tile_scratch()) {}

    void add(const TileRequest &request, const Tag &tag) {
        const size_t nbytes = tile_bytes(request.mode, request.words, request.width, tables_, use_offsets_);
        TileScratch &scratch = scratch_[held_];
        Target out{request.at, request.step, request.tokens, request.width};
        if (out.at == nullptr) {
            out = {scratch.values, TILE_CHANNELS, request.tokens, request.width};
        }
        if (nbytes == 0 || nbytes > request.room) {
            done_(tag, KV_TILE_SIZE, out);
        } else if (request.mode == CONSTANT) {
            done_(tag, decode_constant(tables_, request.data, nbytes, use_offsets_, out, scratch), out);
        } else if (request.mode == PACKED) {
            done_(tag, decode_packed(request.data, nbytes, request.words, out, scratch), out);
        } else {
            hold(request, tag, out);
        }
    }

    void flush() {
        if (held_ == 1) {
            close(0, decode_rans(stream(0), scratch_[0]));
        }
        held_ = 0;
    }

  private:
    void hold(const TileRequest &request, const Tag &tag, const Target &out) {
        const TileCode code =
            open_stream(tables_, request.data, request.words, use_offsets_, request.width, scratch_[held_]);
        if (code != 0) {
            done_(tag, code, out);
            return;
        }
        pending_[held_++] = {tag, out, request.words};
        if (held_ == 2) {
            const RansStream streams[2] = {stream(0), stream(1)};
            Read read[2];
            decode_rans_pair(streams, scratch_, read);
            close(0, read[0]);
            close(1, read[1]);
            held_ = 0;
        }
    }

    RansStream stream(int i) const {
        return {tables_, pending_[i].out.tokens, pending_[i].out.width, pending_[i].words};
    }

    void close(int i, const Read &read) {
        const Pending &tile = pending_[i];
        done_(tile.tag, close_stream(stream(i), read, tile.out, scratch_[i]), tile.out);
    }

    struct Pending {
        Tag tag;
        Target out;
        int words;
    };

    const Tables &tables_;
    const bool use_offsets_;
    Done done_;
    TileScratch *const scratch_; // [2]
    Pending pending_[2];
    int held_ = 0;
};

int32_t decode_symbols(const kv_tiles_args &args, uint64_t *status) {
    const Tables &tables = *static_cast<const Tables *>(args.tables);
    const int tokens = static_cast<int>(args.values.shape[1]), width = static_cast<int>(args.values.shape[2]);
    const int64_t room = args.payload.shape[1];
    const bool direct = in_place(args.values);
    parallel_for(args.values.shape[0], tile_work(tokens, width), [&](int64_t begin, int64_t end) {
        const auto done = [&](int64_t m, TileCode code, const Target &from) {
            if (code != 0) {
                report(status, m, static_cast<kv_code>(code));
            } else if (!direct) {
                copy_out(args.values, m, tokens, width, from.at, TILE_CHANNELS);
            }
        };
        TileDecoder<int64_t, decltype(done)> decoder(tables, args.use_offsets != 0, done);
        for (int64_t m = begin; m < end; ++m) {
            const uint8_t *data = reinterpret_cast<const uint8_t *>(args.payload.data) + m * args.payload.stride[0];
            if (args.payload.stride[1] != 1) {
                static thread_local Scratch held;
                uint8_t *copy = held.take<uint8_t>(room);
                for (int64_t i = 0; i < room; ++i) {
                    copy[i] = data[i * args.payload.stride[1]];
                }
                data = copy;
            }
            const int mode = load<uint8_t>(reinterpret_cast<const char *>(args.modes.data) + m * args.modes.stride[0]);
            const int words =
                load<uint16_t>(reinterpret_cast<const char *>(args.words.data) + m * args.words.stride[0]);
            int16_t *at = direct ? place_of(args.values, m) : nullptr;
            decoder.add({data, static_cast<size_t>(room), mode, words, tokens, width, at, args.values.stride[1] / 2},
                        m);
        }
        decoder.flush();
    });
    return 0;
}
