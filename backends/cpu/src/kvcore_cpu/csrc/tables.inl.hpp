// A table set, laid out for what decoding, encoding and choosing look up in it.

constexpr int CLASSES = 32;
constexpr int SYMBOLS = 256;

// Up to 2^11 slots, a slot's or a symbol's entry fits the 32 bits that vectors gather.
constexpr int PACKED_BITS = 11;

// Division by a frequency, exact for states below 2^31: x * reciprocal >> shift.
struct EncodeEntry {
    uint32_t reciprocal;
    uint32_t limit;      // a state from here on gives up a word first: frequency << (31 - bits)
    uint16_t complement; // 2^bits - frequency
    uint16_t start;
    uint8_t shift;
    uint8_t escape; // coded as ESC: the value follows as a word
    uint16_t reserved;
};

struct Tables {
    int bits;
    int kind;
    uint16_t frequency[CLASSES * SYMBOLS];
    uint16_t start[CLASSES * SYMBOLS];
    uint16_t cost[SYMBOLS * CLASSES]; // by symbol: what all classes take for one lies together
    EncodeEntry encode[CLASSES * SYMBOLS];
    uint8_t *symbol; // [CLASSES << bits]

    // Up to PACKED_BITS only. Slots: frequency << 20 | place in the symbol's interval << 8 | symbol.
    uint32_t *slot; // [CLASSES << bits]; otherwise null
    // Symbols: frequency << 20 | start << 8 | escape.
    uint32_t packed[CLASSES * SYMBOLS];

    ~Tables() {
        std::free(symbol);
        std::free(slot);
    }
};

inline EncodeEntry encode_entry(uint32_t frequency, uint32_t start, int bits, bool escape) {
    // With 2^(s-1) < f <= 2^s and r = ceil(2^(s+31) / f), x * r exceeds x * 2^(s+31) / f by less than 2^(s+31) / f
    // for x < 2^31, which is not enough to reach the next quotient.
    int s = 0;
    while (1u << s < frequency) {
        ++s;
    }
    EncodeEntry entry = {};
    entry.reciprocal = static_cast<uint32_t>(((uint64_t{1} << (s + 31)) + frequency - 1) / frequency);
    entry.limit = frequency << (31 - bits);
    entry.complement = static_cast<uint16_t>((1u << bits) - frequency);
    entry.start = static_cast<uint16_t>(start);
    entry.shift = static_cast<uint8_t>(s + 31);
    entry.escape = escape;
    return entry;
}

void fill_class(Tables &tables, const kv_tables_args &args, int k) {
    for (int s = 0; s < SYMBOLS; ++s) {
        const int at = k * SYMBOLS + s;
        tables.frequency[at] = args.frequency[at];
        tables.start[at] = static_cast<uint16_t>(args.start[at]);
        tables.cost[s * CLASSES + k] = args.cost[at];
        const bool escape = s == 0 || args.frequency[at] == 0; // what has no frequency is coded as ESC
        const int coded = escape ? k * SYMBOLS : at;
        tables.encode[at] = encode_entry(args.frequency[coded], args.start[coded], args.bits, escape);
        tables.packed[at] = uint32_t{args.frequency[coded]} << 20 | args.start[coded] << 8 | escape;
    }
    const size_t slots = size_t{1} << args.bits, first = slots * k;
    std::memcpy(tables.symbol + first, args.symbol + first, slots);
    for (uint32_t i = 0; tables.slot != nullptr && i < slots; ++i) {
        const uint32_t symbol = args.symbol[first + i];
        const int at = k * SYMBOLS + static_cast<int>(symbol);
        tables.slot[first + i] = uint32_t{args.frequency[at]} << 20 | (i - args.start[at]) << 8 | symbol;
    }
}

template <class T> T *allocated(size_t count) {
    void *memory = std::malloc(count * sizeof(T));
    if (memory == nullptr) {
        throw std::bad_alloc();
    }
    return static_cast<T *>(memory);
}

void tables_destroy(void *tables) { delete static_cast<Tables *>(tables); }

void *tables_create(const kv_tables_args &args) {
    std::unique_ptr<Tables> tables(new Tables());
    tables->bits = args.bits;
    tables->kind = args.kind;
    const size_t slots = size_t{CLASSES} << args.bits;
    tables->symbol = allocated<uint8_t>(slots);
    tables->slot = args.bits <= PACKED_BITS ? allocated<uint32_t>(slots) : nullptr;
    for (int k = 0; k < CLASSES; ++k) {
        fill_class(*tables, args, k);
    }
    return tables.release();
}
