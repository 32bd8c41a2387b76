// encode_symbols: each tile in the smallest of three forms.

struct Coded {
    int mode, words;
    size_t nbytes;
};

// Appends bytes to a tile.
struct TileWriter {
    uint8_t *at;

    void put(const void *from, size_t nbytes) {
        std::memcpy(at, from, nbytes);
        at += nbytes;
    }

    void pad(const uint8_t *start) {
        while ((at - start) % 4 != 0) {
            *at++ = 0;
        }
    }
};

void put_side(TileWriter &writer, const Tables &tables, int width, bool use_offsets, const TileScratch &scratch) {
    if (has_side_bytes(tables, use_offsets)) {
        writer.put(scratch.offsets, static_cast<size_t>(width));
    }
}

void put_packed(TileWriter &writer, Rows values, int tokens, int width, int least, int bits) {
    const int16_t base = static_cast<int16_t>(least);
    const uint8_t form[2] = {static_cast<uint8_t>(bits), 0};
    writer.put(&base, sizeof base);
    writer.put(form, sizeof form);
    uint64_t held = 0;
    int count = 0;
    for (int t = 0; t < tokens && bits > 0; ++t) {
        const int16_t *row = values.row(t);
        for (int c = 0; c < width; ++c) {
            held |= static_cast<uint64_t>(row[c] - least) << count;
            count += bits;
            if (count >= 32) {
                store<uint32_t>(writer.at, static_cast<uint32_t>(held));
                writer.at += 4;
                held >>= 32;
                count -= 32;
            }
        }
    }
    const size_t rest = static_cast<size_t>(count + 15) / 16 * 2;
    writer.put(&held, rest);
}

bool is_constant(const uint8_t *symbols, int tokens, int width) {
    const uint8_t first = symbols[0];
    for (int t = 0; t < tokens; ++t) {
        for (int c = 0; c < width; ++c) {
            if (symbols[t * TILE_CHANNELS + c] != first) {
                return false;
            }
        }
    }
    return first != ESC;
}

// Writes a tile of which symbols, classes and offsets are in the scratch memory; `out` has room for tile_capacity.
Coded encode_tile(const Tables &tables, Rows values, int tokens, int width, bool use_offsets, TileScratch &scratch,
                  uint8_t *out) {
    int16_t least = values.at[0], most = least;
    for (int t = 0; t < tokens; ++t) {
        const int16_t *row = values.row(t);
        for (int c = 0; c < width; ++c) {
            least = std::min(least, row[c]);
            most = std::max(most, row[c]);
        }
    }
    int bits = 0;
    while ((most - least) >> bits != 0) {
        ++bits;
    }
    const int packed_words = (tokens * width * bits + 15) / 16;
    const size_t packed = tile_bytes(PACKED, packed_words, width, tables, use_offsets);
    TileWriter writer{out};
    const size_t constant = tile_bytes(CONSTANT, 0, width, tables, use_offsets);
    if (constant <= packed && is_constant(scratch.symbols, tokens, width)) {
        if (tables.kind == KV_EXPONENT) {
            writer.put(scratch.classes, static_cast<size_t>(width));
        }
        put_side(writer, tables, width, use_offsets, scratch);
        writer.put(scratch.symbols, 1);
        writer.pad(out);
        return {CONSTANT, 0, constant};
    }
    if (packed > tile_bytes(RANS, 0, width, tables, use_offsets)) {
        const uint16_t *words = encode_rans({tables, values, tokens, width}, scratch);
        const int count = static_cast<int>(end_of_words(scratch) - words);
        const size_t nbytes = tile_bytes(RANS, count, width, tables, use_offsets);
        if (nbytes < packed) {
            writer.put(scratch.classes, static_cast<size_t>(width));
            put_side(writer, tables, width, use_offsets, scratch);
            writer.pad(out);
            writer.put(scratch.states, 4 * static_cast<size_t>(std::min(LANES, width)));
            writer.put(words, 2 * static_cast<size_t>(count));
            writer.pad(out);
            return {RANS, count, nbytes};
        }
    }
    put_packed(writer, values, tokens, width, least, bits);
    writer.pad(out);
    return {PACKED, packed_words, packed};
}

int32_t encode_symbols(const kv_tiles_args &args, uint64_t *) {
    const Tables &tables = *static_cast<const Tables *>(args.tables);
    const int tokens = static_cast<int>(args.values.shape[1]), width = static_cast<int>(args.values.shape[2]);
    for_tiles(args.values, [&](int64_t m, TileScratch &scratch) {
        const Rows values = rows_of(args.values, m, tokens, width, scratch);
        copy_in(scratch.symbols, TILE_CHANNELS, args.symbols, m, tokens, width);
        line_in(scratch.classes, args.classes, m, width);
        line_in(scratch.offsets, args.offsets, m, width);
        uint8_t tile[TILE_TOKENS * TILE_CHANNELS * 2 + 8];
        const Coded coded = encode_tile(tables, values, tokens, width, args.use_offsets != 0, scratch, tile);
        uint8_t *payload = reinterpret_cast<uint8_t *>(args.payload.data) + m * args.payload.stride[0];
        if (args.payload.stride[1] == 1) {
            std::memcpy(payload, tile, coded.nbytes);
        }
        for (size_t i = 0; args.payload.stride[1] != 1 && i < coded.nbytes; ++i) {
            payload[static_cast<int64_t>(i) * args.payload.stride[1]] = tile[i];
        }
        const uint8_t mode = static_cast<uint8_t>(coded.mode);
        const uint16_t words = static_cast<uint16_t>(coded.words);
        store(reinterpret_cast<char *>(args.modes.data) + m * args.modes.stride[0], mode);
        store(reinterpret_cast<char *>(args.words.data) + m * args.words.stride[0], words);
    });
    return 0;
}
