/* The finaliser of SplitMix64: a bijection of 64-bit words, modulo 2^64.
 *
 * Source: G. Steele, D. Lea, C. Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014 (variant 13 of
 * D. Stafford's mixers).
 */
#ifndef KVCORE_MIX_HPP
#define KVCORE_MIX_HPP

#include "context.hpp"

namespace kvcore {

constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15u; /* 2^64 divided by the golden ratio, odd */

KVCORE_HOST_DEVICE uint64_t mix(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

}  // namespace kvcore

#endif
