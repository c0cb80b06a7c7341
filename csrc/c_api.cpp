// The C interface that Python loads, and the choice of instruction set at run time.
//
// The widest set that both this build and this CPU have is taken, but avx2 where 512 bits are computed in halves (Zen 4):
// wider vectors then only waste more lanes. SUBQUAD_NATIVE_ISA=baseline|avx2|avx512 forces one.
// Experimental, and only where they are named: avx512bf16 is avx512 with products of bfloat16 pairs, if they pass their
// check on this CPU; bf16-emulated is baseline with the same products in float32 arithmetic.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#ifdef SQ_HAVE_X86
#include <cpuid.h>
#endif

#include "call.h"
#include "clustered/call.h"
#include "lsh/call.h"
#include "multipole/call.h"
#include "sparse/call.h"

// All operators of one instruction set.
struct Set {
  const SqKernels* attention;
  const SqMultipoleKernels* multipole;
  const SqClusteredKernels* clustered;
  const SqSparseKernels* sparse;
  const SqLshKernels* lsh;
};
#define SQ_SET(name)                                                                                    \
  namespace name {                                                                                      \
  extern const SqKernels kernels;                                                                       \
  extern const SqMultipoleKernels multipole_kernels;                                                    \
  extern const SqClusteredKernels clustered_kernels;                                                    \
  extern const SqSparseKernels sparse_kernels;                                                          \
  extern const SqLshKernels lsh_kernels;                                                                \
  const Set set = {&kernels, &multipole_kernels, &clustered_kernels, &sparse_kernels, &lsh_kernels};    \
  }

SQ_SET(sq_baseline)
namespace sq_emulated { extern const SqPairKernels pair_kernels; }
#ifdef SQ_HAVE_X86
SQ_SET(sq_avx2)
SQ_SET(sq_avx512)
#endif
#ifdef SQ_HAVE_AVX512BF16
namespace sq_avx512bf16 { extern const SqPairKernels pair_kernels; }
#endif

namespace {

struct Choice {
  const Set* set = nullptr;
  const SqPairKernels* pairs = nullptr;
  const char* name = "";
  char error[256] = "";
};

#ifdef SQ_HAVE_X86
// Whether this CPU splits 512-bit operations into two of 256: AMD's family 19h, of which Zen 4 has them.
bool in_halves() {
  unsigned eax, ebx, ecx, edx;
  if (!__get_cpuid(0, &eax, &ebx, &ecx, &edx)) return false;
  if (ebx != signature_AMD_ebx || ecx != signature_AMD_ecx || edx != signature_AMD_edx) return false;
  if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx)) return false;
  return (eax >> 8 & 15) + (eax >> 20 & 255) == 0x19;
}
#endif

Choice choose() {
  Choice best;
  const char* wanted = std::getenv("SUBQUAD_NATIVE_ISA");
  if (wanted && !*wanted) wanted = nullptr;
  bool known = false;
  auto offer = [&](const char* name, const Set& set, bool has, const SqPairKernels* pairs = nullptr) {
    if (wanted && std::strcmp(wanted, name) != 0) return;
    known = true;
    if (!has || (pairs && !pairs->check())) return;
    best.set = &set, best.pairs = pairs, best.name = name;
  };
  offer("baseline", sq_baseline::set, true);
#ifdef SQ_HAVE_X86
  __builtin_cpu_init();
  offer("avx2", sq_avx2::set, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"));
  const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                    __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma");
  if (wanted || !in_halves()) offer("avx512", sq_avx512::set, wide);
#endif
#ifdef SQ_HAVE_AVX512BF16
  if (wanted) offer("avx512bf16", sq_avx512::set, wide && __builtin_cpu_supports("avx512bf16"), &sq_avx512bf16::pair_kernels);
#endif
  if (wanted) offer("bf16-emulated", sq_baseline::set, true, &sq_emulated::pair_kernels);
  if (!best.set)
    std::snprintf(best.error, sizeof best.error,
                  known ? "SUBQUAD_NATIVE_ISA=%.32s: this CPU does not have these instructions; unset the variable or "
                          "choose baseline"
                        : "SUBQUAD_NATIVE_ISA=%.32s is not an instruction set of this build; expected baseline"
#ifdef SQ_HAVE_X86
                          ", avx2, avx512"
#endif
#ifdef SQ_HAVE_AVX512BF16
                          ", avx512bf16"
#endif
                          " or bf16-emulated"
                  ,
                  wanted ? wanted : "");
  return best;
}

const Choice& chosen() {
  static const Choice choice = choose();
  return choice;
}

// Where rounding features to bfloat16 is no worse than rounding the result to it: there is a result, it is rounded to
// bfloat16, no backward needs the state, and no weight is negative (a normaliser near 0 would blow the rounding up).
bool wants_pairs(const SqCall& p) {
  return chosen().pairs && !p.near && p.length_q > 0 && p.v.dtype == SQ_BFLOAT16 && p.out.dtype == SQ_BFLOAT16 && p.normalise &&
         !p.differentiable && p.function != SQ_IDENTITY && p.function != SQ_TAYLOR;
}

}  // namespace

#define SQ_API extern "C" __attribute__((visibility("default")))

// The version of the structures in every call.h; Python refuses a library of another one.
SQ_API int64_t subquad_abi() { return 10; }
SQ_API int64_t subquad_call_size() { return sizeof(SqCall); }
SQ_API int64_t subquad_multipole_size() { return sizeof(SqMultipole); }
SQ_API int64_t subquad_clustered_size() { return sizeof(SqClustered); }
SQ_API int64_t subquad_sparse_size() { return sizeof(SqSparse); }
SQ_API int64_t subquad_lsh_size() { return sizeof(SqLsh); }
SQ_API int64_t subquad_segment() { return SQ_SEGMENT; }
// The instruction set in use, or "" and then `subquad_error` says why there is none.
SQ_API const char* subquad_isa() { return chosen().name; }
SQ_API const char* subquad_error() { return chosen().error; }
SQ_API int subquad_forward(const SqCall* p) {
  return (wants_pairs(*p) ? chosen().pairs->forward : chosen().set->attention->forward)(p);
}
SQ_API int subquad_backward(const SqCall* p) { return chosen().set->attention->backward(p); }
SQ_API int subquad_step(const SqCall* p) { return chosen().set->attention->step(p); }
SQ_API int subquad_project(const SqCall* p, float* out) { return chosen().set->attention->project(p, out); }
SQ_API int subquad_multipole_forward(const SqMultipole* p) { return chosen().set->multipole->forward(p); }
SQ_API int subquad_multipole_backward(const SqMultipole* p) { return chosen().set->multipole->backward(p); }
SQ_API int64_t subquad_multipole_lanes() { return chosen().set->multipole->lanes; }
SQ_API int64_t subquad_multipole_statistics(const SqMultipolePages* p) { return chosen().set->multipole->statistics(p); }
SQ_API int subquad_multipole_step(const SqMultipolePages* p) { return chosen().set->multipole->step(p); }
SQ_API int subquad_multipole_cluster(const SqMultipolePages* p) { return chosen().set->multipole->cluster(p); }
SQ_API int subquad_multipole_page(const SqMultipolePages* p) { return chosen().set->multipole->page(p); }
SQ_API int subquad_multipole_grow(const SqMultipolePages* from, const SqMultipolePages* to) {
  return chosen().set->multipole->grow(from, to);
}
SQ_API int64_t subquad_multipole_constant_size() { return sizeof(SqConstant); }
SQ_API int subquad_multipole_absorb(const SqConstant* p) { return chosen().set->multipole->absorb(p); }
SQ_API int subquad_multipole_summarise(const SqConstant* p) { return chosen().set->multipole->summarise(p); }
SQ_API int subquad_clustered_forward(const SqClustered* p) { return chosen().set->clustered->forward(p); }
SQ_API int subquad_clustered_backward(const SqClustered* p) { return chosen().set->clustered->backward(p); }
SQ_API int subquad_sparse_forward(const SqSparse* p) { return chosen().set->sparse->forward(p); }
SQ_API int subquad_sparse_backward(const SqSparse* p) { return chosen().set->sparse->backward(p); }
SQ_API int subquad_lsh_forward(const SqLsh* p) { return chosen().set->lsh->forward(p); }
SQ_API int subquad_lsh_backward(const SqLsh* p) { return chosen().set->lsh->backward(p); }
