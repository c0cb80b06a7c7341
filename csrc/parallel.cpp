// Running tasks on several threads without bringing an OpenMP runtime of our own.
//
// torch ships and has already loaded one (libgomp); Python hands us its GOMP_parallel, whose worker threads torch's own
// operators use as well, so nothing is oversubscribed. Without it (macOS, other runtimes), and in a child after fork,
// where libgomp's workers no longer exist, threads are started for the call. Tasks are taken from a counter, so a worker
// that loses its core delays only the task it holds.
#include <atomic>
#include <cstdlib>
#include <thread>
#include <vector>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

#if defined(_WIN32)
#include <malloc.h>
#endif

#include "call.h"

namespace {

typedef void (*GompParallel)(void (*)(void*), void*, unsigned, unsigned);
std::atomic<GompParallel> gomp{nullptr};
std::atomic<bool> forked{false};

struct Region {
  std::atomic<int64_t> next{0}, worker{0};
  int64_t tasks;
  SqBody body;
  void* context;
};

void run(void* p) {
  Region& region = *static_cast<Region*>(p);
  const int64_t me = region.worker.fetch_add(1);
  for (int64_t task = region.next.fetch_add(1); task < region.tasks; task = region.next.fetch_add(1))
    region.body(region.context, task, me);
}

// The scratch block of a thread, freed with it.
struct Scratch {
  float* data = nullptr;
  int64_t size = 0;
  ~Scratch() { sq_release(data); }
};
thread_local Scratch scratch, workspace;

// What is kept between calls: fresh pages cost more than many a call, but one long input must not hold memory for ever.
constexpr int64_t KEPT = int64_t(1) << 26;

float* grown(Scratch& block, int64_t floats) {
  if (floats > block.size) {
    sq_release(block.data);
    block.data = nullptr;
    block.size = 0;
    block.data = sq_allocate(floats + 64);
    if (!block.data) return nullptr;
    block.size = floats;
  }
  return block.data;
}

}  // namespace

float* sq_allocate(int64_t floats) {
  const size_t bytes = sizeof(float) * static_cast<size_t>(floats > 0 ? floats : 1);
#if defined(_WIN32)
  return static_cast<float*>(_aligned_malloc(bytes, 64));
#else
  void* p = nullptr;
  return posix_memalign(&p, 64, bytes) == 0 ? static_cast<float*>(p) : nullptr;
#endif
}

void sq_release(float* memory) {
#if defined(_WIN32)
  _aligned_free(memory);
#else
  std::free(memory);
#endif
}

float* sq_scratch(int64_t floats) { return grown(scratch, floats); }

float* sq_workspace(int64_t floats) { return grown(workspace, floats); }

void sq_workspace_done() {
  if (workspace.size <= KEPT) return;
  sq_release(workspace.data);
  workspace.data = nullptr;
  workspace.size = 0;
}

void sq_parallel(int64_t tasks, int64_t threads, SqBody body, void* context) {
  if (threads > tasks) threads = tasks;
  Region region;
  region.tasks = tasks;
  region.body = body;
  region.context = context;
  if (threads <= 1) return run(&region);
  const GompParallel parallel = gomp.load();
  if (parallel && !forked.load()) return parallel(run, &region, static_cast<unsigned>(threads), 0);
  std::vector<std::thread> others;
  try {
    for (int64_t i = 1; i < threads; i++) others.emplace_back(run, &region);
  } catch (...) {
    // The system refuses more threads: those that exist, and this one, finish the work.
  }
  run(&region);
  for (std::thread& t : others) t.join();
}

extern "C" __attribute__((visibility("default"))) void subquad_use_gomp(void* parallel) {
#if defined(__unix__) || defined(__APPLE__)
  static const int registered = pthread_atfork(nullptr, nullptr, [] { forked.store(true); });
  (void)registered;
#endif
  gomp.store(reinterpret_cast<GompParallel>(parallel));
}
