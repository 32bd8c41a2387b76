// Entropy coding for one instruction set, as in the library, but nothing else of it: sanitizers make compilers slow.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <limits>
#include <memory>
#include <type_traits>

#if KVCORE_ISA_AVX2
#include <immintrin.h>
#endif

#include "decoders.hpp"
#include "support.hpp"

namespace kvcore_cpu {
namespace {

#include "tables.inl.hpp"
#include "tiles.inl.hpp"
#include "classes.inl.hpp"
#include "encode_rans.inl.hpp"
#include "encode.inl.hpp"
#include "decode_rans.inl.hpp"
#include "decode.inl.hpp"
#include "segments.inl.hpp"
#include "segments_decode.inl.hpp"

} // namespace
} // namespace kvcore_cpu

using namespace kvcore_cpu;

#if KVCORE_ISA_AVX2
const Decoders avx2_decoders = {"avx2", tables_create, tables_destroy, decode_symbols, decode_segments};
#else
const Decoders scalar_decoders = {"scalar", tables_create, tables_destroy, decode_symbols, decode_segments};

namespace kvcore_cpu {

int thread_limit() { return 1; }

int32_t refuse(kv_fail code, const char *) { return code; }

} // namespace kvcore_cpu
#endif
