// All ops for one instruction set. A translation unit isa_<name>.cpp defines KVCORE_ISA (and KVCORE_ISA_AVX2), is
// compiled with the flags of that set, and includes this.
//
// Everything here has internal linkage or is inlined: a function that two units share by name would be compiled for
// AVX2 and called on a machine without. The linker takes the first copy it sees, and the scalar unit comes first.
#pragma once

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

#include "kernels.hpp"
#include "support.hpp"

namespace kvcore_cpu {
namespace KVCORE_ISA {
namespace {

#include "rows.inl.hpp"
#include "transpose.inl.hpp"
#include "copy.inl.hpp"
#include "movement.inl.hpp"
#include "bytes.inl.hpp"
#include "lanes.inl.hpp"
#include "nest.inl.hpp"
#include "reduce.inl.hpp"
#include "reduce_moments.inl.hpp"
#include "reduce_norm.inl.hpp"
#include "quantize.inl.hpp"
#include "rotate.inl.hpp"
#include "bits.inl.hpp"
#include "rope.inl.hpp"
#include "tables.inl.hpp"
#include "tiles.inl.hpp"
#include "classes.inl.hpp"
#include "encode_rans.inl.hpp"
#include "encode.inl.hpp"
#include "decode_rans.inl.hpp"
#include "decode.inl.hpp"
#include "segments.inl.hpp"
#include "segments_decode.inl.hpp"

#define KVCORE_TEXT(name) #name
#define KVCORE_NAME(name) KVCORE_TEXT(name)

} // namespace

const Kernels kernels = {
    KVCORE_NAME(KVCORE_ISA),
#define X(op, args) op,
    KVCORE_CPU_OPS(X)
#undef X
    tables_create,
    tables_destroy,
};

} // namespace KVCORE_ISA
} // namespace kvcore_cpu
