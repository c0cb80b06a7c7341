// The C interface that Python loads, and the choice of instruction set at run time.
//
// The widest set that both this build and this CPU have is taken; SUBQUAD_NATIVE_ISA=baseline|avx2|avx512 forces one.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "problem.h"

namespace sq_baseline { extern const SqKernels kernels; }
#ifdef SQ_HAVE_X86
namespace sq_avx2 { extern const SqKernels kernels; }
namespace sq_avx512 { extern const SqKernels kernels; }
#endif

namespace {

struct Choice {
  const SqKernels* kernels = nullptr;
  const char* name = "";
  char error[256] = "";
};

Choice choose() {
  Choice best;
  const char* wanted = std::getenv("SUBQUAD_NATIVE_ISA");
  if (wanted && !*wanted) wanted = nullptr;
  bool known = false;
  auto offer = [&](const char* name, const SqKernels& kernels, bool has) {
    if (wanted && std::strcmp(wanted, name) != 0) return;
    known = true;
    if (has) best.kernels = &kernels, best.name = name;
  };
  offer("baseline", sq_baseline::kernels, true);
#ifdef SQ_HAVE_X86
  __builtin_cpu_init();
  offer("avx2", sq_avx2::kernels, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"));
  offer("avx512", sq_avx512::kernels,
        __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma"));
#endif
  if (!best.kernels)
    std::snprintf(best.error, sizeof best.error,
                  known ? "SUBQUAD_NATIVE_ISA=%.32s: this CPU does not have these instructions; unset the variable or "
                          "choose baseline"
                        : "SUBQUAD_NATIVE_ISA=%.32s is not an instruction set of this build; expected baseline"
#ifdef SQ_HAVE_X86
                          ", avx2 or avx512"
#endif
                  ,
                  wanted ? wanted : "");
  return best;
}

const Choice& chosen() {
  static const Choice choice = choose();
  return choice;
}

}  // namespace

#define SQ_API extern "C" __attribute__((visibility("default")))

// The version of the structures in problem.h; Python refuses a library of another one.
SQ_API int64_t subquad_abi() { return 2; }
SQ_API int64_t subquad_problem_size() { return sizeof(SqProblem); }
SQ_API int64_t subquad_hybrid_size() { return sizeof(SqHybrid); }
SQ_API int64_t subquad_step_size() { return sizeof(SqStep); }
SQ_API int64_t subquad_segment() { return SQ_SEGMENT; }
// The instruction set in use, or "" and then `subquad_error` says why there is none.
SQ_API const char* subquad_isa() { return chosen().name; }
SQ_API const char* subquad_error() { return chosen().error; }
SQ_API int subquad_forward(const SqProblem* p) { return chosen().kernels->forward(p); }
SQ_API int subquad_backward(const SqProblem* p) { return chosen().kernels->backward(p); }
SQ_API int subquad_decode(const SqProblem* p) { return chosen().kernels->decode(p); }
SQ_API int subquad_project(const SqProblem* p, float* out) { return chosen().kernels->project(p, out); }
SQ_API int subquad_hybrid_forward(const SqHybrid* p) { return chosen().kernels->hybrid_forward(p); }
SQ_API int subquad_hybrid_backward(const SqHybrid* p) { return chosen().kernels->hybrid_backward(p); }
SQ_API int subquad_hybrid_decode(const SqStep* p) { return chosen().kernels->hybrid_decode(p); }
