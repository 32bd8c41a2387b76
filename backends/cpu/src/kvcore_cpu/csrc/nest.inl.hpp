// Walking strided arrays in step: axes that continue one another are merged, the two innermost make a slab.

// What a walk hands out: for each operand where the slab begins, and its steps between rows and within one.
template <int N> struct Slab {
    int64_t at[N], row_step[N], step[N];
    int64_t rows, cols;
};

// A loop nest over N operands, outermost axis first. Steps are in whatever unit an operand has.
template <int N> struct Nest {
    int ndim = 0;
    int64_t base[N] = {};
    int64_t extent[KV_MAX_DIMS];
    int64_t step[KV_MAX_DIMS][N];

    // Adds an axis inside those that are there, as part of the one before where that is possible for all operands.
    void add(int64_t count, const int64_t (&steps)[N]) {
        if (count == 1) {
            return;
        }
        bool merges = ndim > 0;
        for (int k = 0; k < N && merges; ++k) {
            merges = step[ndim - 1][k] == count * steps[k];
        }
        if (merges) {
            extent[ndim - 1] *= count;
        } else {
            extent[ndim++] = count;
        }
        std::memcpy(step[ndim - 1], steps, sizeof steps);
    }

    int64_t count() const {
        int64_t product = 1;
        for (int d = 0; d < ndim; ++d) {
            product *= extent[d];
        }
        return product;
    }
};

// A reference to what is called with each slab: bodies are compiled once, however they are walked.
template <int N> class Body {
  public:
    template <class F>
    Body(F &body) : context_(&body), call_([](void *f, const Slab<N> &s) { (*static_cast<F *>(f))(s); }) {}
    void operator()(const Slab<N> &slab) const { call_(context_, slab); }

  private:
    void *context_;
    void (*call_)(void *, const Slab<N> &);
};

template <int N> void walk_slabs(const Nest<N> &nest, Body<N> body) {
    if (nest.count() == 0) {
        return;
    }
    const int outer = nest.ndim > 2 ? nest.ndim - 2 : 0;
    Slab<N> slab = {};
    slab.cols = nest.ndim > 0 ? nest.extent[nest.ndim - 1] : 1;
    slab.rows = nest.ndim > 1 ? nest.extent[nest.ndim - 2] : 1;
    for (int k = 0; k < N; ++k) {
        slab.at[k] = nest.base[k];
        slab.step[k] = nest.ndim > 0 ? nest.step[nest.ndim - 1][k] : 0;
        slab.row_step[k] = nest.ndim > 1 ? nest.step[nest.ndim - 2][k] : 0;
    }
    int64_t index[KV_MAX_DIMS] = {};
    for (;;) {
        body(slab);
        int d = outer - 1;
        for (; d >= 0; --d) {
            const bool more = ++index[d] < nest.extent[d];
            const int64_t moves = more ? 1 : 1 - nest.extent[d];
            for (int k = 0; k < N; ++k) {
                slab.at[k] += moves * nest.step[d][k];
            }
            if (more) {
                break;
            }
            index[d] = 0;
        }
        if (d < 0) {
            return;
        }
    }
}

template <int N> void walk_in_parallel(const Nest<N> &nest, int64_t bytes, int owner, Body<N> body) {
    int cut = -1;
    for (int d = 0; d < nest.ndim; ++d) {
        if ((owner < 0 || nest.step[d][owner] != 0) && (cut < 0 || nest.extent[d] > nest.extent[cut])) {
            cut = d;
        }
    }
    const int64_t extent = cut < 0 ? 1 : nest.extent[cut];
    const int64_t grain = cut == nest.ndim - 1 ? 64 : 1; // rows are cut where lines of the caches end, or nearly
    const int64_t pieces = (extent + grain - 1) / grain;
    parallel_for(pieces, bytes / std::max<int64_t>(pieces, 1), [&](int64_t begin, int64_t end) {
        Nest<N> part = nest;
        if (cut >= 0) {
            part.extent[cut] = std::min(end * grain, extent) - begin * grain;
            for (int k = 0; k < N; ++k) {
                part.base[k] += begin * grain * nest.step[cut][k];
            }
        }
        walk_slabs(part, body);
    });
}

// Calls body(slab) for all of a nest, in C order.
template <int N, class F> void walk(const Nest<N> &nest, F body) { walk_slabs(nest, Body<N>(body)); }

// The same with threads, that share the nest along its longest axis. `owner`: an operand of whose elements no two
// threads may have the same, so that the axis must be one along which it steps; -1 if there is none. `bytes`: of the
// whole work.
template <int N, class F> void walk_parallel(const Nest<N> &nest, int64_t bytes, int owner, F body) {
    walk_in_parallel(nest, bytes, owner, Body<N>(body));
}

// --- arrays of the ABI

inline int64_t item_bytes(const kv_array &a) {
    static constexpr int8_t SIZES[] = {1, 1, 2, 2, 4, 4, 8, 8, 2, 2, 4, 1, 1}; // by kv_dtype
    return SIZES[a.dtype];
}

inline int64_t count_of(const kv_array &a) {
    int64_t count = 1;
    for (int d = 0; d < a.ndim; ++d) {
        count *= a.shape[d];
    }
    return count;
}

inline int64_t bytes_of(const kv_array &a) { return count_of(a) * item_bytes(a); }

// The groups of elements of an array that differ only along some axes, counted in C order of the others.
struct Groups {
    int64_t count = 1;
    int64_t step[KV_MAX_DIMS]; // from an element's group to that of its neighbour along an axis

    Groups(const kv_array &a, uint32_t axes) {
        for (int d = a.ndim - 1; d >= 0; --d) {
            const bool shared = axes >> d & 1;
            step[d] = shared ? 0 : count;
            count *= shared ? 1 : a.shape[d];
        }
    }
};

// A nest of addresses, as offsets from 0.
inline Nest<1> nest_of(const kv_array &a) {
    Nest<1> nest;
    nest.base[0] = static_cast<int64_t>(a.data);
    for (int d = 0; d < a.ndim; ++d) {
        nest.add(a.shape[d], {a.stride[d]});
    }
    return nest;
}

// Calls body(address, i) for each element, i counting in C order; the first `lead` axes have been dealt with.
template <class Body> void each_element(const kv_array &a, int lead, char *data, Body body) {
    Nest<1> nest;
    nest.base[0] = reinterpret_cast<int64_t>(data);
    for (int d = lead; d < a.ndim; ++d) {
        nest.add(a.shape[d], {a.stride[d]});
    }
    int64_t i = 0;
    walk(nest, [&](const Slab<1> &t) {
        for (int64_t r = 0; r < t.rows; ++r) {
            char *p = reinterpret_cast<char *>(t.at[0] + r * t.row_step[0]);
            for (int64_t c = 0; c < t.cols; ++c, p += t.step[0]) {
                body(p, i++);
            }
        }
    });
}

template <class Body> void each_element(const kv_array &a, Body body) {
    each_element(a, 0, reinterpret_cast<char *>(a.data), body);
}

// The one that is slow: finds the first element for which code(address) is not 0, and reports it.
template <class Code> void report_first(const kv_array &a, uint64_t *status, Code code) {
    each_element(a, [&](const char *p, int64_t i) {
        if (const int found = code(p)) {
            report(status, i, static_cast<kv_code>(found));
        }
    });
}
