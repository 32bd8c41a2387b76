// Portable C++, vectorised by the compiler for the baseline of the platform.
#define KVCORE_ISA scalar
#include "isa.hpp"
