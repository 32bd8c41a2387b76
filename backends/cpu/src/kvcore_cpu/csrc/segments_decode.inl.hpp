// Segments of KVS1 back to floats: heads, tiles and steps.

// The bytes of a segment from front to back. `take` returns null where they end.
struct SegmentReader {
    const uint8_t *start, *at, *end;

    const uint8_t *take(int64_t nbytes) {
        if (end - at < nbytes) {
            return nullptr;
        }
        at += nbytes;
        return at - nbytes;
    }
};

// Reads a head up to its tiles; returns 0 or what is wrong. `multipliers` are left alone where all rows are raw.
int read_head(const kv_decode_segments_args &args, int64_t s, SegmentReader &reader, const uint8_t *&multipliers) {
    const uint8_t *head = reader.take(4);
    if (head == nullptr) {
        return KV_SEGMENT_LENGTH;
    }
    const int k = head[0], flags = head[1], raw = head[2];
    const bool all_raw = flags & ALL_RAW;
    const bool counted = all_raw ? raw == args.tokens && k == 0 : raw <= KV_MAX_RAW_ROWS;
    if ((flags & ~(UNROPED | ALL_RAW)) != 0 || head[3] != 0 || !counted) {
        return KV_SEGMENT_HEAD;
    }
    if (!all_raw) {
        const uint8_t *rows = reader.take(raw);
        if (rows == nullptr) {
            return KV_SEGMENT_LENGTH;
        }
        for (int i = 0; i < raw; ++i) {
            if (rows[i] >= args.tokens || (i > 0 && rows[i] <= rows[i - 1])) {
                return KV_SEGMENT_ROWS;
            }
            args.raw_rows[s * KV_MAX_RAW_ROWS + i] = rows[i];
        }
        multipliers = reader.take((args.tokens + 1) / 2);
        if (multipliers == nullptr) {
            return KV_SEGMENT_LENGTH;
        }
        if (args.tokens % 2 != 0 && multipliers[args.tokens / 2] >> 4 != 0) {
            return KV_TILE_PADDING;
        }
    }
    if (reader.take(int64_t{raw} * args.channels * args.itemsize) == nullptr) {
        return KV_SEGMENT_LENGTH;
    }
    const int64_t padding = (4 - (reader.at - reader.start) % 4) % 4;
    const uint8_t *pad = reader.take(padding);
    if (pad == nullptr) {
        return KV_SEGMENT_LENGTH;
    }
    args.flags[s] = static_cast<uint8_t>(flags);
    args.raw_counts[s] = static_cast<int16_t>(raw);
    return any_set(pad, static_cast<size_t>(padding)) ? KV_TILE_PADDING : 0;
}

// A tile on its way: where its values go, and the steps of its tokens.
struct SegmentTile {
    int64_t segment;
    float *values;
    int k;
    const uint8_t *multipliers;

    float step(int token) const {
        const int nibble = multipliers[token / 2] >> token % 2 * 4 & 15;
        return step_of(k + 2 * (nibble + LEAST_MULTIPLIER));
    }
};

// Hands the tiles of segment s to the decoder; returns 0 or what is wrong with the rest of it.
template <class Decoder> int open_segment(const kv_decode_segments_args &args, int64_t s, Decoder &decoder) {
    const Tables &tables = *static_cast<const Tables *>(args.tables);
    const uint8_t *start = args.data + args.first_byte[s];
    SegmentReader reader{start, start, args.data + args.first_byte[s + 1]};
    const uint8_t *multipliers = nullptr;
    const int wrong = read_head(args, s, reader, multipliers);
    if (wrong != 0) {
        return wrong;
    }
    float *values = args.values + s * args.tokens * args.channels;
    const bool all_raw = args.flags[s] & ALL_RAW;
    const int tiles = all_raw ? 0 : (args.channels + TILE_CHANNELS - 1) / TILE_CHANNELS;
    if (args.first_tile[s + 1] - args.first_tile[s] != tiles) {
        return KV_SEGMENT_LENGTH;
    }
    if (all_raw) {
        std::fill_n(values, int64_t{args.tokens} * args.channels, 0.0f);
    }
    for (int i = 0; i < tiles; ++i) {
        const int first = i * TILE_CHANNELS, width = std::min(TILE_CHANNELS, args.channels - first);
        const int mode = args.modes[args.first_tile[s] + i], words = args.words[args.first_tile[s] + i];
        const size_t nbytes = tile_bytes(mode, words, width, tables, true);
        if (nbytes == 0) {
            return KV_TILE_SIZE;
        }
        const uint8_t *data = reader.take(static_cast<int64_t>(nbytes));
        if (data == nullptr) {
            return KV_SEGMENT_LENGTH;
        }
        decoder.add({data, nbytes, mode, words, args.tokens, width, nullptr, 0},
                    {s, values + first, start[0], multipliers});
    }
    return reader.at == reader.end ? 0 : KV_SEGMENT_LENGTH;
}

int32_t decode_segments(const kv_decode_segments_args &args, uint64_t *status) {
    const Tables &tables = *static_cast<const Tables *>(args.tables);
    parallel_for(args.count, tile_work(args.tokens, args.channels), [&](int64_t begin, int64_t end) {
        const auto done = [&](const SegmentTile &tile, TileCode code, const Target &from) {
            if (code != 0) {
                report(status, tile.segment, static_cast<kv_code>(code));
                return;
            }
            for (int t = 0; t < from.tokens; ++t) {
                const int16_t *y = from.row(t);
                const float step = tile.step(t);
                float *row = tile.values + int64_t{t} * args.channels;
                for (int c = 0; c < from.width; ++c) {
                    row[c] = static_cast<float>(y[c]) * step;
                }
            }
        };
        TileDecoder<SegmentTile, decltype(done)> decoder(tables, true, done);
        for (int64_t s = begin; s < end; ++s) {
            const int code = open_segment(args, s, decoder);
            if (code != 0) {
                report(status, s, static_cast<kv_code>(code));
            }
        }
        decoder.flush();
    });
    return 0;
}
