// Runs the blocks of a grid, each thread as a fiber, all in one OS thread.
//
// A thread runs until it waits for others; a warp continues once all its threads wait for the same
// event, and a block once all its warps do. Between two barriers warps run one after another, and
// so do the threads of a warp, in an order that tests set. If no barrier separates two accesses of
// a block, the forward order runs one first and the reverse order the other: a missing barrier
// makes their results differ. In the shuffled order several blocks run at once and switch at
// barriers; a block that signals others by an atomic operation stops until no other block can
// continue, and then the block that stopped last continues first.
//
// A mistake for which a GPU would fault, hang or report nothing ends the launch with
// std::runtime_error, which names the block, the thread and the mistake.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "fiber.h"

struct uint3 {
  unsigned x, y, z;
};

struct dim3 {
  unsigned x, y, z;
  // NOLINTNEXTLINE(misc-explicit-constructor): CUDA's takes a number, too
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) noexcept
      : x(x_), y(y_), z(z_) {}
};

inline uint3 threadIdx, blockIdx;
inline dim3 blockDim, gridDim;

namespace emulation {

// Memory whose values a launch must not read before it has written them.
struct Range {
  uint64_t begin, end;
};
inline Range unwritten;

enum class Order { kForward, kReverse, kShuffled };
inline Order order = Order::kForward;

// Whether only the last block of a launch runs.
inline bool runs_last_block = false;

constexpr unsigned kWarpSize = 32;
constexpr unsigned kMaxThreads = 1024;
constexpr size_t kMaxSharedBytes = 48 * 1024;  // of a launch without cudaFuncSetAttribute
constexpr size_t kGuardBytes = 1024;
constexpr int kPoison = 0xff;  // NaN in every floating-point type
constexpr int kGuard = 0xa5;
constexpr size_t kShuffledBlocks = 4;  // blocks that run at once in the shuffled order

// The events that a thread waits for. All threads of its warp or block must wait for the same
// event, except for kTurn: the thread lets other blocks run first.
enum class Wait {
  kTurn,
  kExit,
  kSyncthreads,
  kSyncwarp,
  kShfl,
  kShflDown,
  kShflXor,
  kAny,
  kBallot
};

struct Thread {
  Fiber fiber;
  uint3 index;
  Wait wait;
  unsigned value_bytes;  // the size of the value that the thread offers to its warp
  uint64_t value;
  uint64_t fenced;    // the phase of its block, or 0: not since the last signal
  bool has_signaled;  // other blocks, by an atomic operation
};

inline std::string to_string(const uint3& index) {
  std::ostringstream text;
  text << "(" << index.x << ", " << index.y << ", " << index.z << ")";
  return text.str();
}

inline std::string describe(const Thread& thread) {
  static const char* const kWaits[] = {
      "waits for its turn",       "has exited",           "waits at __syncthreads",
      "waits at __syncwarp",      "waits at __shfl_sync", "waits at __shfl_down_sync",
      "waits at __shfl_xor_sync", "waits at __any_sync",  "waits at __ballot_sync"};
  std::string text =
      "thread " + to_string(thread.index) + " " + kWaits[static_cast<int>(thread.wait)];
  if (thread.value_bytes != 0) {
    text += " with " + std::to_string(thread.value_bytes) + " bytes";
  }
  return text;
}

// 0 .. count-1 in the order in which blocks, warps or lanes run.
inline std::vector<unsigned> turns(size_t count, std::mt19937& generator) {
  std::vector<unsigned> result(count);
  std::iota(result.begin(), result.end(), 0u);
  if (order == Order::kReverse) {
    std::reverse(result.begin(), result.end());
  } else if (order == Order::kShuffled) {
    std::shuffle(result.begin(), result.end(), generator);
  }
  return result;
}

class Block {
 public:
  static inline Block* current = nullptr;
  static inline Thread* current_thread = nullptr;

  void start(unsigned index, size_t shared_bytes, const std::function<void()>& kernel,
             std::mt19937& generator) {
    index_ = {index % gridDim.x, index / gridDim.x % gridDim.y, index / gridDim.x / gridDim.y};
    kernel_ = &kernel;
    failure_.clear();
    num_threads_ = blockDim.x * blockDim.y * blockDim.z;
    first_phase_ = phase_ = ++num_phases;
    warp_turns_ = turns((num_threads_ + kWarpSize - 1) / kWarpSize, generator);
    lane_turns_ = turns(kWarpSize, generator);
    while (threads_.size() < num_threads_) {
      threads_.push_back(std::make_unique<Thread>());
    }
    for (unsigned i = 0; i < num_threads_; ++i) {
      Thread& thread = *threads_[i];
      thread.fiber.start(&run_thread);
      thread.index = {i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y};
      thread.wait = Wait::kTurn;
      thread.fenced = 0;
      thread.has_signaled = false;
    }
    stored_ = acquired_ = 0;
    shared_bytes_ = shared_bytes;
    shared_.resize(kMaxSharedBytes + kGuardBytes);
#if defined(__SANITIZE_ADDRESS__)  // finds reads past the end too; without it, only writes show
    __asan_unpoison_memory_region(shared_.data(), shared_bytes);
    __asan_poison_memory_region(shared_.data() + shared_bytes, shared_.size() - shared_bytes);
#else
    std::memset(shared_.data() + shared_bytes, kGuard, kGuardBytes);
#endif
    std::memset(shared_.data(), kPoison, shared_bytes);
    fiber_.start(&run_block);
  }

  // Runs the block until it exits, reaches a barrier or signals others.
  Wait resume() {
    current = this;
    blockIdx = index_;
    fiber_.resume();
    if (!failure_.empty()) {
      throw std::runtime_error("block " + to_string(index_) + ": " + failure_);
    }
    return wait_;
  }

  // Called by a thread: waits until all threads of the warp offer a value for the same event and
  // returns the values, indexed by lane.
  const uint64_t* exchange(Wait wait, unsigned mask, uint64_t value, unsigned value_bytes) {
    if (mask != 0xffffffff) {
      fail_thread("expected the mask 0xffffffff of a whole warp");
    }
    current_thread->value = value;
    current_thread->value_bytes = value_bytes;
    suspend(wait);
    return warp_values_;
  }

  void suspend(Wait wait) {
    current_thread->wait = wait;
    Fiber::suspend();
  }

  // Numbers the time between two barriers of the block, uniquely over blocks and launches.
  uint64_t phase() const { return phase_; }
  uint64_t first_phase() const { return first_phase_; }

  // Another block may read this block's stores if a thread of each block signals between two
  // fences. Barriers order a block's stores before the first fence and its loads after the second.
  void note_store() { stored_ = phase_; }

  void fence() {
    current_thread->fenced = phase_;
    if (current_thread->has_signaled) {
      acquired_ = phase_;
    }
  }

  void signal() {
    if (current_thread->fenced <= stored_) {
      fail_thread("signals other blocks without a fence behind the stores of its block");
    }
    current_thread->fenced = 0;
    current_thread->has_signaled = true;
    suspend(Wait::kTurn);
  }

  bool has_acquired() const { return acquired_ != 0 && acquired_ < phase_; }

  void* shared(size_t bytes) {
    if (bytes > shared_bytes_) {
      fail_thread("uses " + std::to_string(bytes) + " bytes of shared memory, but the launch has " +
                  std::to_string(shared_bytes_));
    }
    return shared_.data();
  }

  [[noreturn]] void fail_thread(const std::string& what) {
    fail("thread " + to_string(current_thread->index) + " " + what);
  }

 private:
  static void run_thread() {
    (*current->kernel_)();
    current->suspend(Wait::kExit);
  }

  static void run_block() {
    Block& block = *current;
    while (block.threads_[0]->wait != Wait::kExit) {
      for (unsigned warp : block.warp_turns_) {
        block.run_warp(warp * kWarpSize);
      }
      for (unsigned i = kWarpSize; i < block.num_threads_; i += kWarpSize) {
        block.check_together(*block.threads_[0], *block.threads_[i]);
      }
      block.check_guard();
      block.phase_ = ++num_phases;
      block.stop(block.threads_[0]->wait);
    }
  }

  // Runs the warp of thread `first` until its threads wait at __syncthreads or have exited.
  void run_warp(unsigned first) {
    const unsigned size = std::min(kWarpSize, num_threads_ - first);
    while (threads_[first]->wait != Wait::kExit) {
      for (unsigned lane : lane_turns_) {
        if (lane < size) {
          run_lane(*threads_[first + lane]);
        }
      }
      for (unsigned lane = 0; lane < size; ++lane) {
        check_together(*threads_[first], *threads_[first + lane]);
        warp_values_[lane] = threads_[first + lane]->value;
      }
      const Wait wait = threads_[first]->wait;
      if (wait == Wait::kSyncthreads) {
        return;
      }
      if (wait != Wait::kExit && size < kWarpSize) {
        fail(describe(*threads_[first]) + ", but its warp has only " + std::to_string(size) +
             " threads");
      }
    }
  }

  void run_lane(Thread& thread) {
    while (true) {
      current_thread = &thread;
      threadIdx = thread.index;
      thread.value_bytes = 0;
      thread.fiber.resume();
      if (thread.wait != Wait::kTurn && failure_.empty()) {
        return;
      }
      stop(Wait::kTurn);
    }
  }

  void check_together(const Thread& a, const Thread& b) {
    if (a.wait != b.wait || a.value_bytes != b.value_bytes) {
      fail("divergent: " + describe(a) + ", but " + describe(b));
    }
  }

  void check_guard() {
#if !defined(__SANITIZE_ADDRESS__)
    for (size_t i = 0; i < kGuardBytes; ++i) {
      if (shared_[shared_bytes_ + i] != kGuard) {
        fail("wrote byte " + std::to_string(shared_bytes_ + i) + " of " +
             std::to_string(shared_bytes_) + " bytes of shared memory");
      }
    }
#endif
  }

  void stop(Wait wait) {
    wait_ = wait;
    Fiber::suspend();
  }

  // Ends the launch, from the block or one of its threads, and abandons their stacks.
  [[noreturn]] void fail(const std::string& what) {
    failure_ = what;
    Fiber::suspend();
    std::abort();
  }

  static inline uint64_t num_phases = 0;

  uint3 index_;
  uint64_t first_phase_, phase_;
  uint64_t stored_;    // phase of the last store to global memory, or 0
  uint64_t acquired_;  // phase of the last fence after a signal, or 0
  const std::function<void()>* kernel_;
  Fiber fiber_;  // runs the threads' fibers
  std::string failure_;
  Wait wait_;
  unsigned num_threads_;
  std::vector<std::unique_ptr<Thread>> threads_;
  std::vector<unsigned> warp_turns_, lane_turns_;
  uint64_t warp_values_[kWarpSize];
  size_t shared_bytes_;
  std::vector<unsigned char> shared_;
};

// The running thread's number in its warp.
inline unsigned lane() {
  const uint3& index = Block::current_thread->index;
  return (index.x + blockDim.x * (index.y + blockDim.y * index.z)) % kWarpSize;
}

inline void check_launch(size_t shared_bytes) {
  const uint64_t num_threads = uint64_t{blockDim.x} * blockDim.y * blockDim.z;
  if (num_threads == 0 || num_threads > kMaxThreads || blockDim.z > 64) {
    throw std::runtime_error("launch: expected 1 to 1024 threads, but got " +
                             std::to_string(num_threads));
  }
  if (gridDim.x == 0 || gridDim.y == 0 || gridDim.z == 0 || gridDim.x > 0x7fffffff ||
      gridDim.y > 0xffff || gridDim.z > 0xffff) {
    throw std::runtime_error("launch: bad grid " + to_string({gridDim.x, gridDim.y, gridDim.z}));
  }
  if (shared_bytes > kMaxSharedBytes) {
    throw std::runtime_error("launch: expected at most 49152 bytes of shared memory, but got " +
                             std::to_string(shared_bytes));
  }
}

inline void run_grid(dim3 grid, dim3 block, size_t shared_bytes,
                     const std::function<void()>& kernel) {
  gridDim = grid;
  blockDim = block;
  check_launch(shared_bytes);
  static Block blocks[kShuffledBlocks];  // their threads' stacks serve all launches
  std::vector<Block*> idle, ready, delayed;
  for (Block& one : blocks) {
    idle.push_back(&one);
  }
  idle.resize(order == Order::kShuffled ? kShuffledBlocks : 1);
  std::mt19937 generator(0);
  auto block_turns = turns(size_t{grid.x} * grid.y * grid.z, generator);
  if (runs_last_block) {
    block_turns = {static_cast<unsigned>(block_turns.size() - 1)};
  }
  auto next = block_turns.begin();
  while (true) {
    for (; !idle.empty() && next != block_turns.end(); ++next) {
      idle.back()->start(*next, shared_bytes, kernel, generator);
      ready.push_back(idle.back());
      idle.pop_back();
    }
    if (ready.empty()) {
      if (delayed.empty()) {
        return;
      }
      ready.push_back(delayed.back());
      delayed.pop_back();
    }
    const auto turn = ready.begin() + generator() % ready.size();
    const Wait wait = (*turn)->resume();
    if (wait != Wait::kSyncthreads) {
      (wait == Wait::kExit ? idle : delayed).push_back(*turn);
      ready.erase(turn);
    }
  }
}

}  // namespace emulation
