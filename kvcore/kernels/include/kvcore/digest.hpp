/* digest: 64 bits of each of many byte buffers; and the kernel that copy_batch shares, which moves what it digests.
 *
 * A buffer is cut into 16-byte blocks, the last one padded with zeros; each gives a 64-bit word that depends on its
 * content and number, and the digest is the sum of these words and of one for the length, modulo 2^64. A sum needs no
 * order: threads add what they read, warps add by a butterfly, each warp then adds to the buffer's sum once. The words
 * are made with the finaliser of SplitMix64 (mix.hpp).
 *
 * Buffers are cut into pieces of PIECE_BYTES; a block of threads takes one piece after the other, of whatever buffer.
 */
#ifndef KVCORE_DIGEST_HPP
#define KVCORE_DIGEST_HPP

#include "mix.hpp"
#include "rows.hpp"

#ifndef KVCORE_DEVICE_ONLY
#include <stddef.h>

#include <vector>
#endif

namespace kvcore {

constexpr int64_t PIECE_BYTES = 16 << 10;

struct Buffers {
    const uint64_t *src;        /* [count] addresses */
    const uint64_t *out;        /* [count] addresses of copies, or null */
    const int64_t *nbytes;      /* [count] */
    const int64_t *first_piece; /* [count + 1]: number of pieces of the buffers before */
    int64_t count;
    uint64_t *digests;          /* [count], or null */
    const uint64_t *status;
};

/* The sum begins with the word of the length. */
struct DigestLengths {
    using Args = Buffers;
    static constexpr const char *name = "digest_lengths";
    static constexpr bool flat = true;

    template <class C> KVCORE_DEVICE static void body(const C &ctx, const Args &a) {
        KVCORE_UNLESS_FAILED(a.status);
        for (int64_t i = ctx.block() * ctx.threads() + ctx.thread(); i < a.count; i += ctx.blocks() * ctx.threads())
            a.digests[i] = mix(uint64_t(a.nbytes[i]) ^ 0xD6E8FEB86659FD93u);
    }
};

/* Digests, copies, or both. */
struct DigestPieces {
    using Args = Buffers;
    static constexpr const char *name = "digest_pieces";
    static constexpr bool flat = false;

    template <class C> KVCORE_DEVICE static void body(const C &ctx, const Args &a) {
        KVCORE_UNLESS_FAILED(a.status);
        for (int64_t piece = ctx.block(); piece < a.first_piece[a.count]; piece += ctx.blocks()) {
            const int64_t i = buffer_of(a, piece), begin = (piece - a.first_piece[i]) * PIECE_BYTES;
            const int64_t end = a.nbytes[i] - begin < PIECE_BYTES ? a.nbytes[i] : begin + PIECE_BYTES;
            const char *src = reinterpret_cast<const char *>(uintptr_t(a.src[i]));
            char *out = a.out == nullptr ? nullptr : reinterpret_cast<char *>(uintptr_t(a.out[i]));
            const bool aligned = (a.src[i] | (out == nullptr ? 0 : a.out[i])) % 16 == 0;

            uint64_t sum = 0;
            for (int64_t at = begin + 16 * ctx.thread(); at < end; at += 16 * ctx.threads()) {
                const bool whole = aligned && at + 16 <= end;
                const Word16 word = whole ? *reinterpret_cast<const Word16 *>(src + at) : gather(src + at, end - at);
                if (out != nullptr && whole) *reinterpret_cast<Word16 *>(out + at) = word;
                if (out != nullptr && !whole) spread(word, out + at, end - at);
                if (a.digests != nullptr) sum += digest_word(word, at / 16);
            }
            if (a.digests == nullptr) continue;
            for (int mask = C::warp_width / 2; mask > 0; mask /= 2) sum += ctx.shuffle_xor(sum, mask);
            if (ctx.lane() == 0) C::atomic_add(a.digests + i, sum);
        }
    }

    KVCORE_DEVICE static uint64_t digest_word(const Word16 &word, int64_t number) {
        const uint64_t n = uint64_t(number);
        return mix((mix(word.low + GOLDEN * (2 * n + 1)) ^ word.high) + GOLDEN * (2 * n + 2));
    }

    /* Up to 16 bytes at any address, padded with zeros. */
    KVCORE_DEVICE static Word16 gather(const char *from, int64_t nbytes) {
        Word16 word = {0, 0};
        for (int k = 0; k < 16 && k < nbytes; k++)
            (k < 8 ? word.low : word.high) |= uint64_t(uint8_t(from[k])) << (k % 8 * 8);
        return word;
    }

    KVCORE_DEVICE static void spread(const Word16 &word, char *to, int64_t nbytes) {
        for (int k = 0; k < 16 && k < nbytes; k++) to[k] = char((k < 8 ? word.low : word.high) >> (k % 8 * 8));
    }

    /* The buffer of a piece: the last one that begins at or before it and is not empty. */
    KVCORE_DEVICE static int64_t buffer_of(const Args &a, int64_t piece) {
        int64_t low = 0, high = a.count;
        while (high - low > 1) {
            const int64_t middle = low + (high - low) / 2;
            if (a.first_piece[middle] <= piece) low = middle;
            else high = middle;
        }
        return low;
    }
};

#ifndef KVCORE_DEVICE_ONLY

/* Digests buffers (where `a.digests` says where to), and copies them (where there is `a.out`). Copies from and to the
 * host are the queue's; kernels then digest the end that they reach, or a copy. */
template <class Q> int32_t digest_and_copy(Q &q, const kv_bytes_args &a, uint64_t *status) {
    constexpr int threads = 256;
    if (a.count == 0) return q.failed();
    if (a.digests % 8 != 0) return q.fail(KV_FAIL_UNSUPPORTED, "digests need memory that is aligned to 8 bytes");
    const size_t count = size_t(a.count);
    std::vector<uint64_t> src(count), out(a.out == nullptr ? 0 : count);
    std::vector<int64_t> first_piece(count + 1);
    std::vector<size_t> crossing; /* entries with an end on the host, and those that are better off as a transfer */
    std::vector<void *> staged;   /* for each: a copy to digest where both ends are there, or null */
    for (size_t i = 0; i < count; i++) {
        const int64_t nbytes = a.nbytes[i];
        first_piece[i + 1] = first_piece[i];
        if (nbytes == 0) continue; /* it may be nowhere */
        const bool from_host = !q.reaches(a.src[i]), to_host = a.out != nullptr && !q.reaches(a.out[i]);
        const bool by_engine = a.out != nullptr && a.digests == 0 && nbytes >= q.engine_bytes();
        const bool crosses = by_engine || (a.out != nullptr && (from_host || to_host));
        if (crosses) {
            crossing.push_back(i);
            staged.push_back(a.digests != 0 && from_host && to_host ? q.scratch(nbytes) : nullptr);
            if (a.digests == 0) continue;
        }
        first_piece[i + 1] += (nbytes + PIECE_BYTES - 1) / PIECE_BYTES;
        if (crosses && staged.back() != nullptr) src[i] = uint64_t(uintptr_t(staged.back()));
        else src[i] = uint64_t(uintptr_t(q.template device<const char>(crosses && from_host ? a.out[i] : a.src[i])));
        if (a.out != nullptr && !crosses) out[i] = uint64_t(uintptr_t(q.template device<char>(a.out[i])));
    }
    const bool has_kernels = a.digests != 0 || first_piece[count] > 0;
    if (!has_kernels) { /* all are transfers */
        for (size_t i : crossing) q.transfer(a.out[i], a.src[i], a.nbytes[i]);
        return q.failed();
    }
    Buffers buffers;
    buffers.src = q.upload(src.data(), a.count);
    buffers.out = a.out == nullptr ? nullptr : q.upload(out.data(), a.count);
    buffers.nbytes = q.upload(a.nbytes, a.count);
    buffers.first_piece = q.upload(first_piece.data(), a.count + 1);
    buffers.count = a.count;
    buffers.digests = a.digests == 0 ? nullptr : q.template device<uint64_t>(a.digests);
    buffers.status = status;
    for (size_t c = 0; c < crossing.size(); c++) {
        const size_t i = crossing[c];
        if (staged[c] != nullptr) q.transfer(staged[c], a.src[i], a.nbytes[i]);
        q.transfer(a.out[i], a.src[i], a.nbytes[i]);
    }
    if (buffers.digests != nullptr) q.template launch<DigestLengths>(q.grid(a.count, threads), threads, 0, buffers);
    q.template launch<DigestPieces>(q.grid(first_piece[count], 1), threads, 0, buffers);
    return q.failed();
}

template <class Q> int32_t digest(Q &q, const kv_bytes_args &a, uint64_t *status) {
    kv_bytes_args only = a;
    only.out = nullptr;
    return digest_and_copy(q, only, status);
}

#endif

}  // namespace kvcore

#endif
