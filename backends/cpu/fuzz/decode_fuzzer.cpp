// Decodes mutated tiles and segments, under sanitizers, with every instruction set of this machine: none may read or
// write out of bounds, and all must say the same. `run.py` builds this and writes the corpus.
//
//     decode_fuzzer CORPUS INPUTS SEED
#include <algorithm>
#include <cinttypes>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "decoders.hpp"

namespace {

using Bytes = std::vector<uint8_t>;

struct Tile {
    uint8_t mode;
    uint16_t words;
};

// What a decoder is given. A segment has a tile for each 64 channels, a bare tile is one.
struct Input {
    bool segment, use_offsets;
    uint32_t tables;
    int32_t tokens, channels;
    std::vector<Tile> tiles;
    Bytes data;
};

struct Outcome {
    uint64_t status = KV_OK;
    Bytes output;

    bool operator==(const Outcome &other) const {
        return status == other.status && (status != KV_OK || output == other.output);
    }
};

class File {
  public:
    explicit File(const char *path) : file_(std::fopen(path, "rb")) {
        if (file_ == nullptr) {
            std::perror(path);
            std::exit(2);
        }
    }
    ~File() { std::fclose(file_); }

    template <class T> T number() {
        T value;
        read(&value, sizeof value);
        return value;
    }

    template <class T> std::vector<T> array(size_t count) {
        std::vector<T> values(count);
        read(values.data(), count * sizeof(T));
        return values;
    }

  private:
    void read(void *to, size_t nbytes) {
        if (std::fread(to, 1, nbytes, file_) != nbytes) {
            std::fprintf(stderr, "the corpus ends too early\n");
            std::exit(2);
        }
    }

    std::FILE *file_;
};

void *read_tables(File &file) {
    kv_tables_args args = {};
    args.bits = file.number<int32_t>();
    args.kind = file.number<int32_t>();
    const auto frequency = file.array<uint16_t>(32 * 256), cost = file.array<uint16_t>(32 * 256);
    const auto start = file.array<uint32_t>(32 * 256);
    const auto symbol = file.array<uint8_t>(size_t{32} << args.bits);
    args.frequency = frequency.data();
    args.cost = cost.data();
    args.start = start.data();
    args.symbol = symbol.data();
    return scalar_decoders.tables_create(args); // the layout is that of all instruction sets
}

Input read_input(File &file) {
    Input input;
    input.segment = file.number<int32_t>() != 0;
    input.use_offsets = file.number<int32_t>() != 0;
    input.tables = file.number<uint32_t>();
    input.tokens = file.number<int32_t>();
    input.channels = file.number<int32_t>();
    const auto tiles = file.number<uint32_t>();
    for (uint32_t i = 0; i < tiles; ++i) {
        const auto mode = file.number<uint8_t>();
        input.tiles.push_back({mode, file.number<uint16_t>()});
    }
    input.data = file.array<uint8_t>(file.number<uint32_t>());
    return input;
}

// One array of memory for exactly what is asked for, so that the sanitizer sees the byte beyond.
template <class T> class Exact {
  public:
    explicit Exact(size_t count) : at_(static_cast<T *>(std::calloc(count, sizeof(T)))), count_(count) {}
    ~Exact() { std::free(at_); }
    Exact(const Exact &) = delete;
    Exact &operator=(const Exact &) = delete;

    T *get() const { return at_; }
    Bytes bytes() const {
        const auto *first = reinterpret_cast<const uint8_t *>(at_);
        return Bytes(first, first + count_ * sizeof(T));
    }

  private:
    T *at_;
    size_t count_;
};

kv_array array_of(const void *data, int32_t dtype, std::vector<int64_t> shape, int64_t itemsize) {
    kv_array array = {};
    array.data = reinterpret_cast<uint64_t>(data);
    array.dtype = dtype;
    array.ndim = static_cast<int32_t>(shape.size());
    for (int i = array.ndim; i-- > 0; itemsize *= shape[i]) {
        array.shape[i] = shape[i];
        array.stride[i] = itemsize;
    }
    return array;
}

// Decoders take tiles two at a time: both are the one in question, and the second ends where memory does.
Outcome decode_tile(const Decoders &decoders, const Input &input, const Input &, const void *tables) {
    const int64_t width = std::min(input.channels, 64), size = static_cast<int64_t>(input.data.size());
    const Exact<int16_t> values(static_cast<size_t>(2 * input.tokens * width));
    const Exact<uint8_t> payload(2 * input.data.size());
    std::copy(input.data.begin(), input.data.end(), std::copy(input.data.begin(), input.data.end(), payload.get()));
    const Tile tile = input.tiles[0];
    const uint8_t modes[2] = {tile.mode, tile.mode};
    const uint16_t words[2] = {tile.words, tile.words};
    kv_tiles_args args = {};
    args.values = array_of(values.get(), KV_I16, {2, input.tokens, width}, 2);
    args.payload = array_of(payload.get(), KV_U8, {2, size}, 1);
    args.modes = array_of(modes, KV_U8, {2}, 1);
    args.words = array_of(words, KV_U16, {2}, 2);
    args.tables = tables;
    args.use_offsets = input.use_offsets;
    Outcome outcome;
    decoders.decode_symbols(args, &outcome.status);
    outcome.output = values.bytes();
    return outcome;
}

// A whole segment comes first, and is under way when the one in question comes.
Outcome decode_segment(const Decoders &decoders, const Input &input, const Input &whole, const void *tables) {
    const size_t tiles = whole.tiles.size() + input.tiles.size();
    const Exact<float> values(2 * static_cast<size_t>(input.tokens) * static_cast<size_t>(input.channels));
    const Exact<uint8_t> data(whole.data.size() + input.data.size()), modes(tiles);
    const Exact<uint8_t> rows(2 * KV_MAX_RAW_ROWS), flags(2);
    const Exact<uint16_t> words(tiles);
    const Exact<int16_t> counts(2);
    std::copy(input.data.begin(), input.data.end(), std::copy(whole.data.begin(), whole.data.end(), data.get()));
    for (size_t i = 0; i < tiles; ++i) {
        const Tile tile = i < whole.tiles.size() ? whole.tiles[i] : input.tiles[i - whole.tiles.size()];
        modes.get()[i] = tile.mode;
        words.get()[i] = tile.words;
    }
    const int64_t bytes = static_cast<int64_t>(whole.data.size()), many = static_cast<int64_t>(whole.tiles.size());
    const int64_t first_byte[3] = {0, bytes, bytes + static_cast<int64_t>(input.data.size())};
    const int64_t first_tile[3] = {0, many, static_cast<int64_t>(tiles)};
    kv_decode_segments_args args = {};
    args.data = data.get();
    args.first_byte = first_byte;
    args.modes = modes.get();
    args.words = words.get();
    args.first_tile = first_tile;
    args.tables = tables;
    args.values = values.get();
    args.flags = flags.get();
    args.raw_rows = rows.get();
    args.raw_counts = counts.get();
    args.count = 2;
    args.tokens = input.tokens;
    args.channels = input.channels;
    args.itemsize = 2;
    Outcome outcome;
    decoders.decode_segments(args, &outcome.status);
    outcome.output = values.bytes();
    return outcome;
}

class Mutator {
  public:
    explicit Mutator(uint64_t seed) : engine_(seed) {}

    uint64_t below(uint64_t n) { return engine_() % n; }

    void mutate(Input &input) {
        for (uint64_t n = 1 + below(4); n-- > 0;) {
            change(input);
        }
    }

  private:
    void change(Input &input) {
        Bytes &data = input.data;
        const uint64_t at = data.empty() ? 0 : below(below(2) ? data.size() : std::min<size_t>(data.size(), 400));
        switch (below(data.empty() ? 4 : 9)) {
        case 0:
            if (!input.tiles.empty()) {
                input.tiles[below(input.tiles.size())].mode = static_cast<uint8_t>(below(4));
            }
            break;
        case 1:
            if (!input.tiles.empty()) {
                uint16_t &words = input.tiles[below(input.tiles.size())].words;
                words = static_cast<uint16_t>(below(4) ? words + below(5) - 2 : below(65536));
            }
            break;
        case 2:
            data.insert(data.end(), below(300), static_cast<uint8_t>(below(256)));
            break;
        case 3:
            input.tokens = static_cast<int32_t>(below(8) ? input.tokens : 1 + below(256));
            break;
        case 4:
            data.resize(below(4) ? data.size() - std::min<size_t>(data.size(), below(9)) : at);
            break;
        case 5:
            data[at] = static_cast<uint8_t>(below(256));
            break;
        case 6:
            data[at] ^= static_cast<uint8_t>(1u << below(8));
            break;
        case 7:
            data[at] = below(2) ? 0 : 255;
            break;
        default:
            data.erase(data.begin() + static_cast<ptrdiff_t>(at));
        }
    }

    std::mt19937_64 engine_;
};

} // namespace

int main(int argc, char **argv) {
    if (argc != 4) {
        std::fprintf(stderr, "usage: decode_fuzzer CORPUS INPUTS SEED\n");
        return 2;
    }
    File file(argv[1]);
    const uint64_t inputs = std::strtoull(argv[2], nullptr, 10);
    Mutator mutator(std::strtoull(argv[3], nullptr, 10));
    std::vector<void *> tables;
    for (auto n = file.number<uint32_t>(); n > 0; --n) {
        tables.push_back(read_tables(file));
    }
    std::vector<Input> corpus;
    for (auto n = file.number<uint32_t>(); n > 0; --n) {
        corpus.push_back(read_input(file));
    }
    std::vector<const Decoders *> sets = {&scalar_decoders};
#if KVCORE_HAVE_AVX2
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2")) {
        sets.push_back(&avx2_decoders);
    }
#endif
    uint64_t good = 0;
    for (uint64_t i = 0; i < inputs; ++i) {
        const Input &seed = corpus[i < corpus.size() ? i : mutator.below(corpus.size())];
        Input input = seed;
        if (i >= corpus.size()) { // the seeds themselves come first
            mutator.mutate(input);
        }
        Outcome first;
        for (const Decoders *decoders : sets) {
            const auto decode = input.segment ? decode_segment : decode_tile;
            const Outcome outcome = decode(*decoders, input, seed, tables[input.tables]);
            if (decoders == sets[0]) {
                first = outcome;
            } else if (!(outcome == first)) {
                std::fprintf(stderr, "input %" PRIu64 ": %s says %" PRIx64 ", %s %" PRIx64 ", or other values\n", i,
                             decoders->isa, outcome.status, sets[0]->isa, first.status);
                return 1;
            }
        }
        if (i < corpus.size() && first.status != KV_OK) {
            std::fprintf(stderr, "seed %" PRIu64 " is refused: %" PRIx64 "\n", i, first.status);
            return 1;
        }
        good += first.status == KV_OK;
    }
    std::printf("%" PRIu64 " inputs from %zu seeds, %zu instruction sets: %" PRIu64 " decoded, the others refused\n",
                inputs, corpus.size(), sets.size(), good);
    for (void *held : tables) {
        scalar_decoders.tables_destroy(held);
    }
    return 0;
}
