// Copying tokens between two strided places. What is adjacent on both sides moves in one piece; what is turned over
// (channels adjacent on one side, tokens on the other) is transposed.

// Where one plane's element [token, head, channel] lies.
struct Place {
    char *base;
    int64_t token, head, dim;

    Place at(int64_t offset) const { return {base + offset, token, head, dim}; }
};

// How the tokens of one plane are copied, decided once from the strides of both sides.
class Copier {
  public:
    Copier(const kv_part &part, const Place &to, const Place &from, bool streamed)
        : heads_(part.heads), width_(part.width), item_(part.itemsize), streamed_(streamed) {
        const int64_t row = width_ * item_, token = heads_ * row;
        const bool rows = width_ == 1 || (to.dim == item_ && from.dim == item_);
        const bool whole = rows && (heads_ == 1 || (to.head == row && from.head == row));
        row_ = whole ? token : row;
        if (token == 0) {
            kind_ = Nothing;
        } else if (whole) {
            kind_ = to.token == token && from.token == token ? Tokens : Rows;
            heads_ = 1;
        } else if (rows) {
            kind_ = Rows;
        } else if (to.dim == item_ && from.token == item_) {
            kind_ = ToRows;
        } else if (from.dim == item_ && to.token == item_) {
            kind_ = FromRows;
        } else {
            kind_ = Elements;
        }
    }

    // Bytes of a token that are adjacent on both sides, if it is made up of such rows; else 0.
    int64_t row_bytes() const { return kind_ == Tokens || kind_ == Rows ? row_ : 0; }

    // Hands over the rows of some tokens.
    void collect(Gatherer &gatherer, const Place &to, const Place &from, int64_t tokens) const {
        for (int64_t t = 0; t < tokens; ++t) {
            for (int64_t h = 0; h < heads_; ++h) {
                gatherer.add(to.base + t * to.token + h * to.head, from.base + t * from.token + h * from.head);
            }
        }
    }

    void copy(const Place &to, const Place &from, int64_t tokens) const {
        switch (kind_) {
        case Nothing:
            return;
        case Tokens:
            return one_row(to.base, from.base, tokens * row_);
        case Rows:
            if (from.head > from.token) { // in the order in which they are read
                for (int64_t h = 0; h < heads_; ++h) {
                    rows(to.at(h * to.head), from.at(h * from.head), tokens, to.token, from.token);
                }
            } else {
                for (int64_t t = 0; t < tokens; ++t) {
                    rows(to.at(t * to.token), from.at(t * from.token), heads_, to.head, from.head);
                }
            }
            return;
        default:
            switch (item_) {
            case 1: return items<uint8_t>(to, from, tokens);
            case 2: return items<uint16_t>(to, from, tokens);
            case 4: return items<uint32_t>(to, from, tokens);
            case 8: return items<uint64_t>(to, from, tokens);
            default: return elements(to, from, tokens);
            }
        }
    }

  private:
    enum Kind { Nothing, Tokens, Rows, ToRows, FromRows, Elements };

    void rows(const Place &to, const Place &from, int64_t count, int64_t to_stride, int64_t from_stride) const {
        for (int64_t i = 0; i < count; ++i) {
            one_row(to.base + i * to_stride, from.base + i * from_stride, row_);
        }
    }

    void one_row(char *to, const char *from, int64_t bytes) const {
        streamed_ ? stream_row(to, from, bytes) : copy_row(to, from, bytes);
    }

    template <class T> void items(const Place &to, const Place &from, int64_t tokens) const {
        for (int64_t h = 0; h < heads_; ++h) {
            char *target = to.base + h * to.head;
            const char *source = from.base + h * from.head;
            if (kind_ == ToRows) {
                transpose<T>(target, to.token, source, from.dim, width_, tokens, streamed_);
            } else if (kind_ == FromRows) {
                transpose<T>(target, to.dim, source, from.token, tokens, width_, streamed_);
            } else {
                for (int64_t t = 0; t < tokens; ++t) {
                    for (int64_t d = 0; d < width_; ++d) {
                        const T value = load<T>(source + t * from.token + d * from.dim);
                        store(target + t * to.token + d * to.dim, value);
                    }
                }
            }
        }
    }

    void elements(const Place &to, const Place &from, int64_t tokens) const {
        for (int64_t t = 0; t < tokens; ++t) {
            for (int64_t h = 0; h < heads_; ++h) {
                for (int64_t d = 0; d < width_; ++d) {
                    char *target = to.base + t * to.token + h * to.head + d * to.dim;
                    std::memcpy(target, from.base + t * from.token + h * from.head + d * from.dim, item_);
                }
            }
        }
    }

    int64_t heads_, width_, item_, row_;
    bool streamed_;
    Kind kind_;
};
