/* Moving the bytes of tokens in one plane: rows of words, as wide as the alignment of both sides allows.
 *
 * What a token has in a plane is `heads * width` elements. Where the channels of a head are adjacent on both sides a
 * head is one row, and where the heads are adjacent too the whole token is; otherwise each element is a row of its own.
 * The threads of a warp take the words of all rows in turn, so that neighbours move neighbouring words.
 */
#ifndef KVCORE_ROWS_HPP
#define KVCORE_ROWS_HPP

#include "context.hpp"

namespace kvcore {

/* The widest move: on CUDA and AMD a copy of this struct is one 16-byte load and one store. */
struct alignas(16) Word16 {
    uint64_t low, high;
};

struct RowShape {
    int32_t rows;    /* rows of a token */
    int32_t split;   /* rows of a head: 1, or its width where each element is a row */
    int32_t words;   /* words of a row */
    int32_t bytes;   /* of a word: 1, 2, 4, 8 or 16; every word is aligned to it on both sides */
};

/* Tokens that a warp moves together. Their loads are under way at the same time, so that the wait for memory is shared;
 * and where a word lies in its token is found once for all of them. */
constexpr int TOKENS_TOGETHER = 4;

/* Where the first elements of a token lie; `to` is null where there is none. */
struct TokenMove {
    char *to;
    const char *from;
};

template <class Word, class C>
KVCORE_DEVICE void copy_words(const C &ctx, const RowShape &s, const TokenMove (&tokens)[TOKENS_TOGETHER],
                              const kv_plane &to_plane, const kv_plane &from_plane) {
    const int32_t count = s.rows * s.words;
    for (int32_t i = ctx.lane(); i < count; i += C::warp_width) {
        const int32_t row = i / s.words, word = i - row * s.words;
        const int32_t head = row / s.split, element = row - head * s.split;
        const int64_t offset = word * int64_t(sizeof(Word));
        const int64_t to = head * to_plane.head_stride + element * to_plane.dim_stride + offset;
        const int64_t from = head * from_plane.head_stride + element * from_plane.dim_stride + offset;
        Word moved[TOKENS_TOGETHER] = {};
        for (int k = 0; k < TOKENS_TOGETHER; k++)
            if (tokens[k].to != nullptr) moved[k] = *reinterpret_cast<const Word *>(tokens[k].from + from);
        for (int k = 0; k < TOKENS_TOGETHER; k++)
            if (tokens[k].to != nullptr) *reinterpret_cast<Word *>(tokens[k].to + to) = moved[k];
    }
}

/* Copies tokens, by one warp. Of the planes only the strides of head and dim are read. */
template <class C>
KVCORE_DEVICE void copy_rows(const C &ctx, const RowShape &s, const TokenMove (&tokens)[TOKENS_TOGETHER],
                             const kv_plane &to_plane, const kv_plane &from_plane) {
    switch (s.bytes) {
        case 16: return copy_words<Word16>(ctx, s, tokens, to_plane, from_plane);
        case 8: return copy_words<uint64_t>(ctx, s, tokens, to_plane, from_plane);
        case 4: return copy_words<uint32_t>(ctx, s, tokens, to_plane, from_plane);
        case 2: return copy_words<uint16_t>(ctx, s, tokens, to_plane, from_plane);
        default: return copy_words<uint8_t>(ctx, s, tokens, to_plane, from_plane);
    }
}

#ifndef KVCORE_DEVICE_ONLY

/* Finds the shape that serves all planes of a part; `add` each plane of both sides, then `shape`. */
class RowPlanner {
  public:
    explicit RowPlanner(const kv_part &part) : part_(part) {}

    void add(const kv_plane &plane, bool has_blocks) {
        const int64_t item = part_.itemsize;
        channels_adjacent_ &= part_.width == 1 || plane.dim_stride == item;
        heads_adjacent_ &= part_.heads == 1 || plane.head_stride == part_.width * item;
        outer_ |= plane.base | uint64_t(plane.token_stride) | (has_blocks ? uint64_t(plane.block_stride) : 0);
        heads_ |= uint64_t(plane.head_stride);
        channels_ |= uint64_t(plane.dim_stride);
    }

    RowShape shape() const {
        const bool whole = channels_adjacent_ && heads_adjacent_;
        const int64_t head_bytes = int64_t(part_.width) * part_.itemsize;
        const int64_t row_bytes = whole ? head_bytes * part_.heads : channels_adjacent_ ? head_bytes : part_.itemsize;
        uint64_t steps = outer_ | uint64_t(row_bytes);
        if (!whole && part_.heads > 1) steps |= heads_;
        if (!channels_adjacent_) steps |= channels_;
        int32_t bytes = 16;
        while (steps % uint64_t(bytes) != 0) bytes /= 2;
        RowShape s;
        s.rows = whole ? 1 : channels_adjacent_ ? part_.heads : part_.heads * part_.width;
        s.split = channels_adjacent_ ? 1 : part_.width;
        s.words = int32_t(row_bytes / bytes);
        s.bytes = bytes;
        return s;
    }

  private:
    kv_part part_;
    bool channels_adjacent_ = true, heads_adjacent_ = true;
    uint64_t outer_ = 0, heads_ = 0, channels_ = 0; /* bits of all strides: what they are multiples of */
};

/* Replaces the addresses of planes, which have elements, by what kernels dereference. */
template <class Q> void make_reachable(Q &q, kv_plane *planes, int64_t count) {
    for (int64_t i = 0; i < count; i++) planes[i].base = uint64_t(uintptr_t(q.template device<char>(planes[i].base)));
}

#endif

}  // namespace kvcore

#endif
