// Copying rows of bytes: single ones, streamed past the caches, and in groups from all over memory.

constexpr int64_t LINE = 64; // bytes of a cache line

// One cache line. Streamed means past the caches, so that what is overwritten is not read first; `to` is aligned then.
template <bool streamed> inline void copy_line(char *to, const char *from) {
#if KVCORE_ISA_AVX2
    const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from));
    const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from + 32));
    if (streamed) {
        _mm256_stream_si256(reinterpret_cast<__m256i *>(to), a);
        _mm256_stream_si256(reinterpret_cast<__m256i *>(to + 32), b);
    } else {
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), a);
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(to + 32), b);
    }
#else
    std::memcpy(to, from, LINE);
#endif
}

inline void copy_row(char *to, const char *from, int64_t bytes) {
#if KVCORE_ISA_AVX2
    // memcpy's choice by size costs as much as the copy of a head; beyond a page it knows better.
    if (bytes >= LINE / 2 && bytes <= 16 * LINE) {
        int64_t i = 0;
        for (; i + LINE <= bytes; i += LINE) {
            copy_line<false>(to + i, from + i);
        }
        const auto half = [&](int64_t at) {
            const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from + at));
            _mm256_storeu_si256(reinterpret_cast<__m256i *>(to + at), a);
        };
        if (i + LINE / 2 <= bytes) {
            half(i);
        }
        if (bytes % (LINE / 2) != 0) {
            half(bytes - LINE / 2);
        }
        return;
    }
#endif
    std::memcpy(to, from, static_cast<size_t>(bytes));
}

// What is left before and behind whole lines, mostly nothing: then not even a call.
inline void copy_rest(char *to, const char *from, int64_t bytes) {
    if (bytes > 0) {
        std::memcpy(to, from, static_cast<size_t>(bytes));
    }
}

inline int64_t to_next_line(const char *p) {
    return static_cast<int64_t>(-reinterpret_cast<uintptr_t>(p) & (LINE - 1));
}

// Whether a row is worth streaming. One that begins within a line writes two lines in halves: it has to be long.
inline bool streamable(const char *to, int64_t bytes) { return bytes >= (to_next_line(to) == 0 ? LINE : 16 * LINE); }

// The caller ends a sequence of streamed rows with end_of_stream().
inline void stream_row(char *to, const char *from, int64_t bytes) {
#if KVCORE_ISA_AVX2
    if (streamable(to, bytes)) {
        int64_t i = to_next_line(to);
        copy_rest(to, from, i);
        for (; i + LINE <= bytes; i += LINE) {
            copy_line<true>(to + i, from + i);
        }
        copy_rest(to + i, from + i, bytes - i);
        return;
    }
#endif
    copy_row(to, from, bytes);
}

inline void end_of_stream() {
#if KVCORE_ISA_AVX2
    _mm_sfence();
#endif
}

// Rows from all over memory are copied in groups, line by line in turn, while the lines of the next group are asked
// for: a processor foresees the next line of a row, but not a slot that an index names.
struct Pair {
    char *to;
    const char *from;
};

constexpr int64_t GROUP = 8;

template <bool streamed> void copy_group(const Pair *rows, const Pair *next, int64_t bytes) {
    int64_t head[GROUP], lines = bytes / LINE;
    for (int64_t m = 0; m < GROUP; ++m) {
        head[m] = streamed ? std::min(to_next_line(rows[m].to), bytes) : 0;
        copy_rest(rows[m].to, rows[m].from, head[m]);
        lines = std::min(lines, (bytes - head[m]) / LINE);
    }
    for (int64_t i = 0; i < lines; ++i) {
        for (int64_t m = 0; m < GROUP; ++m) {
            __builtin_prefetch(next[m].from + i * LINE, 0, 1);
            copy_line<streamed>(rows[m].to + head[m] + i * LINE, rows[m].from + head[m] + i * LINE);
        }
    }
    for (int64_t m = 0; m < GROUP; ++m) {
        const int64_t done = head[m] + lines * LINE;
        copy_rest(rows[m].to + done, rows[m].from + done, bytes - done);
    }
}

// Collects rows of one length into groups. Order is not kept: no two rows may have one target.
class Gatherer {
  public:
    Gatherer(int64_t bytes, bool streamed) : bytes_(bytes), streamed_(streamed) {}

    void add(char *to, const char *from) {
        pairs_[count_++] = {to, from};
        if (count_ == 2 * GROUP) {
            group(pairs_, pairs_ + GROUP);
            std::memcpy(pairs_, pairs_ + GROUP, sizeof(Pair) * GROUP);
            count_ = GROUP;
        }
    }

    void finish() {
        if (count_ >= GROUP) {
            group(pairs_, pairs_);
            std::memcpy(pairs_, pairs_ + GROUP, sizeof(Pair) * GROUP);
            count_ -= GROUP;
        }
        for (int64_t i = 0; i < count_; ++i) {
            const Pair &row = pairs_[i];
            streamed_ ? stream_row(row.to, row.from, bytes_) : copy_row(row.to, row.from, bytes_);
        }
        count_ = 0;
    }

  private:
    void group(const Pair *rows, const Pair *next) const {
        const bool streamed = streamed_ && streamable(rows[0].to, bytes_);
        streamed ? copy_group<true>(rows, next, bytes_) : copy_group<false>(rows, next, bytes_);
    }

    Pair pairs_[2 * GROUP];
    int64_t count_ = 0, bytes_;
    bool streamed_;
};
