// x86-64 with AVX2, F16C and BMI2; without FMA, which would round once where the definition rounds twice.
#define KVCORE_ISA avx2
#define KVCORE_ISA_AVX2 1
#include "isa.hpp"
