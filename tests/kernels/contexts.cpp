// Kernels that show what the context of CPUs does: contexts CASE WARP_WIDTH SEED
#include <kvcore/portable.hpp>
#include <kvcore/queue_cpu.hpp>

#include <stdio.h>
#include <string.h>

namespace {

struct Args {
    uint64_t *out;
};

// out[thread of all, 0..3]: sum over the warp, ballot, value of the next lane, value of the thread opposite in the block.
struct Collectives {
    using Args = ::Args;
    static constexpr const char *name = "collectives";
    static constexpr bool flat = false;
    template <class C> static void body(const C &ctx, const Args &a) {
        const int64_t number = ctx.block() * ctx.threads() + ctx.thread();
        const uint32_t mine = uint32_t(number * number);
        uint64_t sum = mine;
        for (int mask = 1; mask < C::warp_width; mask *= 2) sum += ctx.shuffle_xor(sum, mask);
        uint32_t *shared = ctx.template shared<uint32_t>(16);
        shared[ctx.thread()] = mine;
        a.out[number * 4 + 0] = sum;
        a.out[number * 4 + 1] = ctx.ballot(mine % 3 == 0);
        a.out[number * 4 + 2] = ctx.shuffle(mine, (ctx.lane() + 1) % C::warp_width);
        ctx.barrier();
        a.out[number * 4 + 3] = shared[ctx.threads() - 1 - ctx.thread()];
    }
};

// The last one to write wins.
struct Race {
    using Args = ::Args;
    static constexpr const char *name = "race";
    static constexpr bool flat = true;
    template <class C> static void body(const C &ctx, const Args &a) {
        a.out[0] = uint64_t(ctx.block() * ctx.threads() + ctx.thread());
    }
};

// As in `collectives`, but nobody waits for the others.
struct MissingBarrier {
    using Args = ::Args;
    static constexpr const char *name = "missing_barrier";
    static constexpr bool flat = false;
    template <class C> static void body(const C &ctx, const Args &a) {
        uint32_t *shared = ctx.template shared<uint32_t>();
        shared[ctx.thread()] = uint32_t(ctx.thread());
        a.out[ctx.block() * ctx.threads() + ctx.thread()] = shared[ctx.threads() - 1 - ctx.thread()];
    }
};

constexpr int STRAY = 17;

template <class C> bool stray(const C &ctx) { return ctx.block() == 1 && ctx.thread() == STRAY; }

struct SkipsBarrier {
    using Args = ::Args;
    static constexpr const char *name = "skips_barrier";
    static constexpr bool flat = false;
    template <class C> static void body(const C &ctx, const Args &) {
        if (!stray(ctx)) ctx.barrier();
    }
};

struct SkipsBallot {
    using Args = ::Args;
    static constexpr const char *name = "skips_ballot";
    static constexpr bool flat = false;
    template <class C> static void body(const C &ctx, const Args &a) {
        if (!stray(ctx)) a.out[0] = ctx.ballot(true);
        ctx.barrier();
    }
};

struct ShufflesElsewhere {
    using Args = ::Args;
    static constexpr const char *name = "shuffles_elsewhere";
    static constexpr bool flat = false;
    template <class C> static void body(const C &ctx, const Args &a) {
        a.out[0] = stray(ctx) ? ctx.ballot(true) : ctx.shuffle(uint64_t(1), 0);
    }
};

struct ShufflesFromNowhere {
    using Args = ::Args;
    static constexpr const char *name = "shuffles_from_nowhere";
    static constexpr bool flat = false;
    template <class C> static void body(const C &ctx, const Args &a) {
        a.out[0] = ctx.shuffle(uint64_t(1), stray(ctx) ? C::warp_width : 0);
    }
};

struct WaitsInFlat {
    using Args = ::Args;
    static constexpr const char *name = "waits_in_flat";
    static constexpr bool flat = true;
    template <class C> static void body(const C &ctx, const Args &) {
        if (stray(ctx)) ctx.barrier();
    }
};

struct BeyondShared {
    using Args = ::Args;
    static constexpr const char *name = "beyond_shared";
    static constexpr bool flat = false;
    template <class C> static void body(const C &ctx, const Args &) {
        if (stray(ctx)) ctx.template shared<char>()[64] = 1;
    }
};

struct Overflow {
    using Args = ::Args;
    static constexpr const char *name = "overflow";
    static constexpr bool flat = false;
    template <class C> static void body(const C &ctx, const Args &) {
        volatile int most = 0x7FFFFFFF;
        if (stray(ctx)) most = most + 1;
    }
};

constexpr int BLOCKS = 3, THREADS = 128;

template <class K, int Width> void show(int64_t count) {
    uint64_t out[BLOCKS * THREADS * 4] = {};
    kvcore::CpuQueue<Width> queue(nullptr);
    queue.template launch<K>(BLOCKS, THREADS, K::flat ? 0 : strcmp(K::name, "beyond_shared") == 0 ? 64 : 1024, {out});
    for (int64_t i = 0; i < count; i++) printf("%llu\n", static_cast<unsigned long long>(out[i]));
}

bool same(float a, float b) { return kvcore::float_bits(a) == kvcore::float_bits(b) || (a != a && b != b); }

// Compares with the processor's own division and square root, which are correctly rounded.
void portable(uint64_t seed) {
    const uint32_t corners[] = {0,          1,          2,          0x7FFFFF,   0x800000,   0x800001,   0xFFFFFF,
                                0x33FFFFFF, 0x3F7FFFFF, 0x3F800000, 0x3F800001, 0x40000000, 0x40490FDB, 0x4B7FFFFF,
                                0x4B800000, 0x7F7FFFFF, 0x7F7FFFFE, 0x7F800000, 0x7F800001, 0x7FC00000};
    long wrong = 0, tried = 0;
    auto compare = [&](uint32_t a, uint32_t b) {
        const float x = kvcore::bits_float(a), y = kvcore::bits_float(b);
        wrong += !same(kvcore::portable_divide(x, y), x / y);
        wrong += !same(kvcore::portable_square_root(x), __builtin_sqrtf(x));
        tried += 2;
    };
    for (uint32_t a : corners)
        for (uint32_t b : corners)
            for (uint32_t signs = 0; signs < 4; signs++) compare(a | signs << 31, b | signs >> 1 << 31);
    for (int i = 0; i < 1000000; i++) {
        const uint64_t drawn = kvcore::mix(seed + kvcore::GOLDEN * uint64_t(i));
        uint32_t a = uint32_t(drawn), b = uint32_t(drawn >> 32);
        if (i % 4 == 1) b = (b & 0x807FFFFF) | (a & 0x7F800000); // quotients near 1
        if (i % 4 == 2) a &= 0x807FFFFF;                         // subnormal dividends
        if (i % 4 == 3) a &= 0xFFFFF000, b &= 0xFFFFF000;        // exact results and ties
        compare(a, b);
    }
    printf("%ld\n%ld\n", tried, wrong);
}

void order() {
    long wrong = 0;
    for (int64_t n = 0; n < 300; n++)
        for (uint64_t seed = 0; seed < 20; seed++) {
            std::vector<char> seen(size_t(n), 0);
            kvcore::Order order(n, seed);
            for (int64_t i = 0; i < n; i++) seen[size_t(order.next())]++;
            for (char times : seen) wrong += times != 1;
        }
    printf("%ld\n", wrong);
}

template <int Width> int run(const char *what) {
    auto is = [what](const char *name) { return strcmp(what, name) == 0; };
    if (is("collectives")) show<Collectives, Width>(BLOCKS * THREADS * 4);
    else if (is("race")) show<Race, Width>(1);
    else if (is("missing_barrier")) show<MissingBarrier, Width>(THREADS);
    else if (is("skips_barrier")) show<SkipsBarrier, Width>(0);
    else if (is("skips_ballot")) show<SkipsBallot, Width>(0);
    else if (is("shuffles_elsewhere")) show<ShufflesElsewhere, Width>(0);
    else if (is("shuffles_from_nowhere")) show<ShufflesFromNowhere, Width>(0);
    else if (is("waits_in_flat")) show<WaitsInFlat, Width>(0);
    else if (is("beyond_shared")) show<BeyondShared, Width>(0);
    else if (is("overflow")) show<Overflow, Width>(0);
    else if (is("portable")) portable(kvcore::cpu_seed);
    else if (is("order")) order();
    else return 2;
    return 0;
}

}  // namespace

int main(int argc, char **argv) {
    if (argc != 4) return 2;
    kvcore::cpu_seed = strtoull(argv[3], nullptr, 10);
    switch (atoi(argv[2])) {
        case 16: return run<16>(argv[1]);
        case 32: return run<32>(argv[1]);
        case 64: return run<64>(argv[1]);
        default: return 2;
    }
}
