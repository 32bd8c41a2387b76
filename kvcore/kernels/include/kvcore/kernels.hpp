/* All ops: their kernels and, unless KVCORE_DEVICE_ONLY is defined, their launchers. */
#ifndef KVCORE_KERNELS_HPP
#define KVCORE_KERNELS_HPP

#include "choose_classes.hpp"
#include "convert_layout.hpp"
#include "copy_batch.hpp"
#include "count_symbols.hpp"
#include "decode_symbols.hpp"
#include "dequantize.hpp"
#include "digest.hpp"
#include "encode_symbols.hpp"
#include "gather_paged.hpp"
#include "pack_bits.hpp"
#include "quantize.hpp"
#include "reduce_absmax.hpp"
#include "reduce_minmax.hpp"
#include "reduce_moments.hpp"
#include "reduce_norm.hpp"
#include "rotate.hpp"
#include "scatter_paged.hpp"
#include "settle_status.hpp"
#include "shift_rope.hpp"
#include "tables.hpp"
#include "unpack_bits.hpp"

#endif
