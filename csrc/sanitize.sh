#!/bin/sh
# The tests of the native backend under the address and undefined-behaviour sanitizers (GCC or Clang on Linux).
#
#   sh csrc/sanitize.sh [pytest arguments]      PYTHON=.venv/bin/python by default
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
build=${BUILD:-$root/build/sanitize}
cmake -S "$root" -B "$build" -G Ninja -DSUBQUAD_SANITIZE=ON >/dev/null
cmake --build "$build"
# The interpreter itself is not instrumented, so the runtimes have to be there before it starts. Leaks are Python's own.
# The C++ runtime goes with them: without it the sanitizer cannot intercept the exceptions that torch throws.
compiler=${CXX:-g++}
preload=$($compiler -print-file-name=libasan.so):$($compiler -print-file-name=libubsan.so):$($compiler -print-file-name=libstdc++.so)
cd "$root"
# torch.compile and child processes are left out: they start compilers and interpreters that must not be preloaded.
SUBQUAD_NATIVE_LIBRARY=$build/libsubquad_native.so SUBQUAD_REQUIRE_NATIVE=1 LD_PRELOAD=$preload \
ASAN_OPTIONS=detect_leaks=0:verify_asan_link_order=0 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 \
  "$python" -m pytest tests/kernels tests/mechanisms/test_lsh.py -k "native and not compiles and not instruction and not openmp and not fork" "$@"
