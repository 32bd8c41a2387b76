// gather_paged, scatter_paged, convert_layout. A request is resolved into runs of tokens that are neighbours on both
// sides, a window at a time; each plane then copies the runs.

// Copies of so many bytes and more go past the caches.
constexpr int64_t STREAMED_BYTES = 4 << 20;
constexpr int64_t WINDOW = 512; // tokens

// Tokens that follow one another in the cache and in their chunk.
struct Run {
    int64_t block, offset; // in the cache
    int64_t chunk, token;  // in the chunks
    int64_t count;
};

class Request {
  public:
    explicit Request(const kv_paged_args &args)
        : a_(args), index_(reinterpret_cast<const char *>(args.index)),
          planes_(int64_t{args.part_count} * args.layers) {
        // Blocks that follow one another without a gap are one long block: no division, and runs across blocks.
        uniform_ = true;
        for (int64_t p = 0; p < planes_ && uniform_; ++p) {
            uniform_ = a_.blocks <= 1 || a_.paged[p].block_stride == a_.block_tokens * a_.paged[p].token_stride;
        }
    }

    int64_t tokens() const { return a_.first_token[a_.chunk_count]; }
    int64_t planes() const { return planes_; }
    const kv_part &part(int64_t plane) const { return a_.parts[plane / a_.layers]; }

    int64_t token_bytes() const {
        int64_t bytes = 0;
        for (int32_t p = 0; p < a_.part_count; ++p) {
            bytes += int64_t{a_.parts[p].heads} * a_.parts[p].width * a_.parts[p].itemsize;
        }
        return bytes * a_.layers;
    }

    // Reports the first entry that is out of range or, if asked, has the target of an earlier one.
    bool check(bool duplicates, uint64_t *status) const {
        const int64_t step = a_.unit == KV_SLOT ? 1 : a_.block_tokens;
        if (a_.skip_tokens >= tokens() || step == 0) {
            return true;
        }
        const int64_t limit = a_.unit == KV_SLOT ? a_.blocks * a_.block_tokens : a_.blocks;
        const int64_t first = a_.skip_tokens / step, last = (tokens() - 1) / step;
        static thread_local Scratch scratch;
        uint64_t *const seen = duplicates ? scratch.take_zeroed<uint64_t>(limit / 64 + 1) : nullptr;
        int64_t i = first;
        for (; i <= last; ++i) {
            const int64_t target = entry(i);
            if (target < -1 || target >= limit) {
                report(status, i, KV_SLOT_RANGE);
                break;
            }
            if (target < 0 || !duplicates) {
                continue;
            }
            const uint64_t bit = uint64_t{1} << (target % 64);
            if (seen[target / 64] & bit && !halves(i, first, last, step)) {
                report(status, i, KV_SLOT_DUPLICATE);
                break;
            }
            seen[target / 64] |= bit;
        }
        for (int64_t j = first; duplicates && j < i; ++j) { // the scratch is left as it was found
            if (entry(j) >= 0) {
                seen[entry(j) / 64] = 0;
            }
        }
        return *status == KV_OK;
    }

    // Resolves tokens begin .. end into runs; `runs` has room for one per token.
    int64_t resolve(int64_t begin, int64_t end, Run *runs) const {
        int64_t n = 0, chunk = 0;
        for (int64_t t = begin; t < end;) {
            while (t >= a_.first_token[chunk + 1]) {
                ++chunk;
            }
            int64_t stop = std::min(end, a_.first_token[chunk + 1]), slot, count = 1;
            if (a_.unit == KV_SLOT) {
                slot = entry(t);
            } else {
                const int64_t block = entry(t / a_.block_tokens), offset = t % a_.block_tokens;
                count = std::min(a_.block_tokens - offset, stop - t);
                slot = block < 0 ? -1 : block * a_.block_tokens + offset;
            }
            const int64_t token = t - a_.first_token[chunk];
            t += count;
            if (slot < 0) {
                continue;
            }
            const int64_t block = uniform_ ? 0 : slot / a_.block_tokens;
            const int64_t offset = uniform_ ? slot : slot - block * a_.block_tokens;
            if (n > 0) {
                Run &before = runs[n - 1];
                if (before.chunk == chunk && before.token + before.count == token && before.block == block &&
                    before.offset + before.count == offset) {
                    before.count += count;
                    continue;
                }
            }
            runs[n++] = {block, offset, chunk, token, count};
        }
        return n;
    }

    Place cache(int64_t plane) const { return place(a_.paged[plane]); }
    Place chunk(int64_t plane, int64_t chunk) const { return place(a_.chunks[chunk * planes_ + plane]); }
    int64_t block_stride(int64_t plane) const { return a_.paged[plane].block_stride; }

    static Place place(const kv_plane &plane) {
        return {reinterpret_cast<char *>(plane.base), plane.token_stride, plane.head_stride, plane.dim_stride};
    }

  private:
    int64_t entry(int64_t i) const { return load<int64_t>(index_ + 8 * i); }

    // Whether the first and the last entry, in parts, share a block without sharing a token.
    bool halves(int64_t i, int64_t first, int64_t last, int64_t step) const {
        return i == last && entry(i) == entry(first) && (tokens() - 1) % step < a_.skip_tokens % step;
    }

    const kv_paged_args &a_;
    const char *index_;
    int64_t planes_;
    bool uniform_;
};

// Runs that are shorter than this are taken to be anywhere: they are gathered row by row.
constexpr int64_t SCATTERED_TOKENS = 4, GATHERED_BYTES = 128;

template <bool gather>
void move_runs(const Request &request, int64_t plane, const Run *runs, int64_t n, bool streamed) {
    const Place cache = request.cache(plane);
    const int64_t block_stride = request.block_stride(plane);
    for (int64_t i = 0; i < n;) {
        const int64_t current = runs[i].chunk;
        const Place chunk = request.chunk(plane, current);
        const Copier copier(request.part(plane), gather ? chunk : cache, gather ? cache : chunk, streamed);
        const bool grouped = gather && copier.row_bytes() >= GATHERED_BYTES;
        Gatherer gatherer(copier.row_bytes(), streamed);
        for (; i < n && runs[i].chunk == current; ++i) {
            const Run &run = runs[i];
            const Place there = cache.at(run.block * block_stride + run.offset * cache.token);
            const Place here = chunk.at(run.token * chunk.token);
            if (grouped && run.count < SCATTERED_TOKENS) {
                copier.collect(gatherer, here, there, run.count);
            } else {
                copier.copy(gather ? here : there, gather ? there : here, run.count);
            }
        }
        gatherer.finish();
    }
}

template <bool gather> int32_t move_paged(const kv_paged_args &a, uint64_t *status) {
    const Request request(a);
    const bool ordered = !gather && !a.check_duplicates; // of two tokens with one target one wins, whole
    if (!request.check(!gather && a.check_duplicates, status)) {
        return 0;
    }
    const int64_t planes = request.planes(), token_bytes = request.token_bytes();
    const int64_t first = a.skip_tokens, tokens = request.tokens() - first;
    if (tokens <= 0 || planes == 0 || token_bytes == 0) {
        return 0;
    }
    const bool streamed = tokens * token_bytes >= STREAMED_BYTES;
    const int64_t windows = (tokens + WINDOW - 1) / WINDOW;
    const auto window = [&](int64_t w, Run *runs) {
        return request.resolve(first + w * WINDOW, first + std::min(tokens, (w + 1) * WINDOW), runs);
    };
    if (ordered) {
        parallel_for(planes, tokens * token_bytes / planes, [&](int64_t begin, int64_t end) {
            Run runs[WINDOW];
            for (int64_t w = 0; w < windows; ++w) {
                const int64_t n = window(w, runs);
                for (int64_t plane = begin; plane < end; ++plane) {
                    move_runs<gather>(request, plane, runs, n, streamed);
                }
            }
            end_of_stream();
        });
        return 0;
    }
    parallel_for(windows * planes, tokens * token_bytes / (windows * planes), [&](int64_t begin, int64_t end) {
        Run runs[WINDOW];
        int64_t n = 0, resolved = -1;
        for (int64_t i = begin; i < end; ++i) {
            if (i / planes != resolved) {
                resolved = i / planes;
                n = window(resolved, runs);
            }
            move_runs<gather>(request, i % planes, runs, n, streamed);
        }
        end_of_stream();
    });
    return 0;
}

int32_t gather_paged(const kv_paged_args &a, uint64_t *status) { return move_paged<true>(a, status); }

int32_t scatter_paged(const kv_paged_args &a, uint64_t *status) { return move_paged<false>(a, status); }

int32_t convert_layout(const kv_convert_args &a, uint64_t *) {
    const int64_t planes = int64_t{a.part_count} * a.layers;
    int64_t token_bytes = 0;
    for (int32_t p = 0; p < a.part_count; ++p) {
        token_bytes += int64_t{a.parts[p].heads} * a.parts[p].width * a.parts[p].itemsize * a.layers;
    }
    if (a.tokens <= 0 || planes == 0) {
        return 0;
    }
    const bool streamed = a.tokens * token_bytes >= STREAMED_BYTES;
    const int64_t windows = (a.tokens + WINDOW - 1) / WINDOW;
    parallel_for(windows * planes, a.tokens * token_bytes / (windows * planes), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            const int64_t plane = i / windows, token = i % windows * WINDOW;
            const Place to = Request::place(a.out[plane]), from = Request::place(a.src[plane]);
            const Copier copier(a.parts[plane / a.layers], to, from, streamed);
            copier.copy(to.at(token * to.token), from.at(token * from.token), std::min(WINDOW, a.tokens - token));
        }
        end_of_stream();
    });
    return 0;
}
