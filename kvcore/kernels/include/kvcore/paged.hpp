/* What gather_paged and scatter_paged share: checking an index before anything moves, and moving the tokens.
 *
 * Duplicate targets are found without sorting, in three passes over the index: the cell of every target in a scratch
 * table is set to "nobody", then to the least position that names it (atomic minimum), and whoever finds another
 * position there comes second. Only cells that the index names are touched, so the size of the cache costs no time.
 * All positions are those of index entries; the least that is wrong in any way is reported.
 *
 * A warp moves a few tokens of one layer: it finds their chunk by a binary search, then copies rows (rows.hpp).
 */
#ifndef KVCORE_PAGED_HPP
#define KVCORE_PAGED_HPP

#include "rows.hpp"
#include "views.hpp"

#ifndef KVCORE_DEVICE_ONLY
#include <stddef.h>

#include <vector>
#endif

namespace kvcore {

/* The index of a request, and which of its entries count. */
struct PagedIndex {
    const int64_t *entries; /* [count] slots or blocks */
    int64_t count;
    int64_t limit; /* slots or blocks of the cache */
    int64_t first; /* entries before it have only tokens that are skipped */
};

/* Reports entries outside -1 .. limit - 1; sets the cell of every target to "nobody" where a table is given. */
struct CheckPagedRange {
    struct Args {
        PagedIndex index;
        uint64_t *least;  /* [limit], or null */
        uint64_t *status;
    };
    static constexpr const char *name = "check_paged_range";
    static constexpr bool flat = true;

    template <class C> KVCORE_DEVICE static void body(const C &ctx, const Args &a) {
        for (int64_t i = a.index.first + ctx.block() * ctx.threads() + ctx.thread(); i < a.index.count;
             i += ctx.blocks() * ctx.threads()) {
            const int64_t target = a.index.entries[i];
            if (target < -1 || target >= a.index.limit) C::report(a.status, KV_SLOT_RANGE, i);
            else if (target >= 0 && a.least != nullptr) a.least[target] = UINT64_MAX;
        }
    }
};

/* Makes the cell of every target the least position that names it. Like the pass after it, it does not look at the
 * status, to which others are reporting: the cells that it touches are those that the pass before has set. */
struct FindPagedFirst {
    using Args = CheckPagedRange::Args;
    static constexpr const char *name = "find_paged_first";
    static constexpr bool flat = true;

    template <class C> KVCORE_DEVICE static void body(const C &ctx, const Args &a) {
        for (int64_t i = a.index.first + ctx.block() * ctx.threads() + ctx.thread(); i < a.index.count;
             i += ctx.blocks() * ctx.threads()) {
            const int64_t target = a.index.entries[i];
            if (target >= 0 && target < a.index.limit) C::atomic_min(a.least + target, uint64_t(i));
        }
    }
};

/* Reports entries whose target an earlier one has. */
struct CheckPagedDuplicates {
    using Args = CheckPagedRange::Args;
    static constexpr const char *name = "check_paged_duplicates";
    static constexpr bool flat = true;

    template <class C> KVCORE_DEVICE static void body(const C &ctx, const Args &a) {
        for (int64_t i = a.index.first + ctx.block() * ctx.threads() + ctx.thread(); i < a.index.count;
             i += ctx.blocks() * ctx.threads()) {
            const int64_t target = a.index.entries[i];
            if (target >= 0 && target < a.index.limit && a.least[target] != uint64_t(i))
                C::report(a.status, KV_SLOT_DUPLICATE, i);
        }
    }
};

/* Moves the tokens of one part. */
struct MovePaged {
    struct Args {
        PagedIndex index;
        const kv_plane *paged;      /* [layers] */
        const kv_plane *chunks;     /* chunk c has its planes of this part at c * chunk_pitch, [layers] */
        const int64_t *first_token; /* [chunk_count + 1] */
        int64_t chunk_pitch;
        int64_t skip_tokens, tokens, block_tokens;
        int64_t entry_tokens;       /* tokens of an index entry: 1, or block_tokens */
        RowShape shape;
        int32_t chunk_count, layers;
        int32_t gather;             /* else scatter */
        const uint64_t *status;
    };
    static constexpr const char *name = "move_paged";
    static constexpr bool flat = true;

    template <class C> KVCORE_DEVICE static void body(const C &ctx, const Args &a) {
        KVCORE_UNLESS_FAILED(a.status);
        const int64_t groups = (a.tokens - a.skip_tokens + TOKENS_TOGETHER - 1) / TOKENS_TOGETHER;
        const int warps = ctx.threads() / C::warp_width;
        for (int64_t item = ctx.block() * warps + ctx.warp(); item < groups * a.layers; item += ctx.blocks() * warps) {
            int64_t group = item;
            const int64_t layer = divide_by(groups, &group);
            const kv_plane paged = a.paged[layer];
            int64_t token = a.skip_tokens + group * TOKENS_TOGETHER;
            const int64_t end = token + TOKENS_TOGETHER < a.tokens ? token + TOKENS_TOGETHER : a.tokens;
            while (token < end) { /* once, unless another chunk begins here, which may have other strides */
                const int32_t chunk = chunk_of(a, token);
                const int64_t stop = a.first_token[chunk + 1] < end ? a.first_token[chunk + 1] : end;
                const kv_plane dense = a.chunks[chunk * a.chunk_pitch + layer];
                TokenMove moves[TOKENS_TOGETHER];
                for (int k = 0; k < TOKENS_TOGETHER; k++) {
                    moves[k].to = nullptr;
                    if (token + k < stop) find_token(a, paged, dense, token + k, a.first_token[chunk], moves[k]);
                }
                if (a.gather) copy_rows(ctx, a.shape, moves, dense, paged);
                else copy_rows(ctx, a.shape, moves, paged, dense);
                token = stop;
            }
        }
    }

    /* Find the two places of a token, unless the index leaves it out. */
    KVCORE_DEVICE static void find_token(const Args &a, const kv_plane &paged, const kv_plane &dense, int64_t token,
                                         int64_t first_token, TokenMove &move) {
        int64_t within = token; /* the index entry */
        const int64_t target = a.index.entries[divide_by(a.entry_tokens, &within)];
        if (target < 0) return;
        int64_t offset = target * a.entry_tokens + within; /* of the slot in the block */
        const int64_t block = divide_by(a.block_tokens, &offset);
        char *in_cache = reinterpret_cast<char *>(uintptr_t(paged.base)) + block * paged.block_stride +
                         offset * paged.token_stride;
        char *in_chunk = reinterpret_cast<char *>(uintptr_t(dense.base)) + (token - first_token) * dense.token_stride;
        move.to = a.gather ? in_chunk : in_cache;
        move.from = a.gather ? in_cache : in_chunk;
    }

    /* The chunk that holds a token: the last one that begins at or before it and is not empty. */
    KVCORE_DEVICE static int32_t chunk_of(const Args &a, int64_t token) {
        int32_t low = 0, high = a.chunk_count;
        while (high - low > 1) {
            const int32_t middle = low + (high - low) / 2;
            if (a.first_token[middle] <= token) low = middle;
            else high = middle;
        }
        return low;
    }
};

#ifndef KVCORE_DEVICE_ONLY


/* Tokens are taken to be fewer than 2^55, so that positions fit a status word. */
template <class Q>
int32_t move_paged(Q &q, const kv_paged_args &a, uint64_t *status, bool gather, bool check_duplicates) {
    constexpr int threads = 256;
    const int64_t tokens = a.first_token[a.chunk_count], slots = a.blocks * a.block_tokens;
    const int64_t entry_tokens = a.unit == KV_BLOCK && slots > 0 ? a.block_tokens : 1;
    if (tokens <= a.skip_tokens) return q.failed();

    PagedIndex index;
    index.entries = q.template device<const int64_t>(a.index);
    index.count = a.index_count;
    index.limit = slots / entry_tokens;
    index.first = a.skip_tokens / entry_tokens;
    uint64_t *least = check_duplicates ? static_cast<uint64_t *>(q.scratch(index.limit * 8)) : nullptr;

    const int64_t planes = int64_t(a.part_count) * a.layers;
    std::vector<kv_plane> paged(a.paged, a.paged + planes), chunks(a.chunks, a.chunks + planes * a.chunk_count);
    if (slots > 0) make_reachable(q, paged.data(), planes);
    for (int64_t c = 0; c < a.chunk_count; c++)
        if (a.first_token[c] < a.first_token[c + 1]) make_reachable(q, &chunks[size_t(c * planes)], planes);
    const kv_plane *paged_table = q.upload(paged.data(), int64_t(paged.size()));
    const kv_plane *chunk_table = q.upload(chunks.data(), int64_t(chunks.size()));
    const int64_t *first_token = q.upload(a.first_token, int64_t(a.chunk_count) + 1);

    const int64_t blocks = q.grid(index.count - index.first, threads);
    const CheckPagedRange::Args check = {index, least, status};
    q.template launch<CheckPagedRange>(blocks, threads, 0, check);
    if (check_duplicates) {
        q.template launch<FindPagedFirst>(blocks, threads, 0, check);
        q.template launch<CheckPagedDuplicates>(blocks, threads, 0, check);
    }
    for (int32_t part = 0; part < a.part_count && slots > 0; part++) {
        const int64_t first_plane = int64_t(part) * a.layers;
        RowPlanner planner(a.parts[part]);
        for (int64_t layer = 0; layer < a.layers; layer++) {
            planner.add(paged[size_t(first_plane + layer)], true);
            for (int64_t chunk = 0; chunk < a.chunk_count; chunk++)
                if (a.first_token[chunk] < a.first_token[chunk + 1])
                    planner.add(chunks[size_t(chunk * planes + first_plane + layer)], false);
        }
        const MovePaged::Args move = {
            index,         paged_table + first_plane, chunk_table + first_plane, first_token, planes,
            a.skip_tokens, tokens,                    a.block_tokens,            entry_tokens, planner.shape(),
            a.chunk_count, a.layers,                  gather,                    status};
        const int64_t items = (tokens - a.skip_tokens + TOKENS_TOGETHER - 1) / TOKENS_TOGETHER * a.layers;
        q.template launch<MovePaged>(q.grid(items, threads / Q::warp_width), threads, 0, move);
    }
    return q.failed();
}

#endif

}  // namespace kvcore

#endif
