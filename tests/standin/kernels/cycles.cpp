#include "cycles.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <map>
#include <set>
#include <stdexcept>
#include <unordered_map>
#include <unordered_set>

#define STANDIN_WITHOUT_CUDA
#include "standin.h"

namespace syncbn::emulation::ptx {
namespace {

constexpr size_t kSchedulers = 4;
constexpr size_t kResident = 2;  // blocks: kBlocks of csrc/cuda/kernels/plan.h
constexpr unsigned kBanks = 32;
constexpr unsigned kSector = 32;  // bytes

// Latencies in cycles, rounded from what microbenchmarks of Volta and Hopper report.
constexpr double kMemory = 500;
constexpr double kL2 = 250;
constexpr double kSharedMemory = 24;
constexpr double kRestart = 20;  // after a barrier

struct Cost {
  double issue;    // cycles of the scheduler
  double latency;  // until the result can be read
};

Cost cost_of(Unit unit) {
  switch (unit) {
    case Unit::kWideInteger:
      return {2, 6};
    case Unit::kDouble:
      return {2, 8};
    case Unit::kConvertDouble:
      return {4, 12};
    case Unit::kApproximation:
      return {8, 22};
    case Unit::kDivideInteger:
      return {20, 110};
    case Unit::kDivideFloat:
      return {10, 60};
    case Unit::kDivideDouble:
      return {40, 540};
    case Unit::kBranch:
      return {1, 8};
    case Unit::kSignal:
      return {1, 500};
    default:
      return {1, 4};
  }
}

using Program = std::vector<Instruction>;

bool is_shared(Unit unit) { return unit == Unit::kSharedLoad || unit == Unit::kSharedStore; }
bool is_global(Unit unit) { return unit == Unit::kGlobalLoad || unit == Unit::kGlobalStore; }

// --- What a warp executes

struct ThreadStep {
  uint32_t number;
  uint64_t address;
};

struct WarpStep {
  const Instruction* instruction;
  unsigned turns = 0;             // of shared memory
  std::vector<uint64_t> sectors;  // of global memory
};

using WarpSteps = std::vector<WarpStep>;
using Addresses = std::vector<uint64_t>;

// A bank gives one of its words in a turn; lanes with 128 bytes have turns of their own.
unsigned shared_turns(const Addresses& addresses, unsigned num_bytes) {
  const size_t lanes = 128 / std::max(4u, num_bytes);
  unsigned turns = 0;
  for (size_t first = 0; first < addresses.size(); first += lanes) {
    std::array<std::set<uint64_t>, kBanks> words;
    for (size_t i = first; i < std::min(addresses.size(), first + lanes); ++i) {
      for (unsigned byte = 0; byte < num_bytes; byte += 4) {
        const uint64_t word = (addresses[i] + byte) / 4;
        words[word % kBanks].insert(word);
      }
    }
    size_t most = 0;
    for (const auto& of_bank : words) {
      most = std::max(most, of_bank.size());
    }
    turns += most;
  }
  return turns;
}

std::vector<uint64_t> sectors_of(const Addresses& addresses, unsigned num_bytes) {
  std::set<uint64_t> sectors;
  for (const uint64_t address : addresses) {
    sectors.insert(address / kSector);
    sectors.insert((address + num_bytes - 1) / kSector);
  }
  return {sectors.begin(), sectors.end()};
}

// An instruction's k-th access of each lane is one access of the warp.
using Accesses = std::map<std::pair<uint32_t, uint32_t>, Addresses>;

WarpSteps join_lanes(const Program& program, const std::vector<ThreadStep>* lanes, size_t size) {
  Accesses accesses;
  const std::vector<ThreadStep>* longest = lanes;
  for (size_t i = 0; i < size; ++i) {
    std::unordered_map<uint32_t, uint32_t> turn;
    for (const auto& [number, address] : lanes[i]) {
      if (address != 0) {
        accesses[{number, turn[number]++}].push_back(address);
      }
    }
    if (lanes[i].size() > longest->size()) {
      longest = &lanes[i];
    }
  }
  WarpSteps result;
  std::unordered_map<uint32_t, uint32_t> turn;
  for (const auto& [number, address] : *longest) {
    const Instruction& instruction = program[number];
    WarpStep step{&instruction};
    if (address != 0) {
      const Addresses& all = accesses.at({number, turn[number]++});
      if (is_shared(instruction.unit)) {
        step.turns = shared_turns(all, instruction.num_bytes);
      } else {
        step.sectors = sectors_of(all, instruction.num_bytes);
      }
    }
    result.push_back(std::move(step));
  }
  return result;
}

// --- The multiprocessor

struct Warp {
  const WarpSteps* steps;
  size_t scheduler;
  double next;  // its next instruction does not issue before
  std::vector<double> ready;
  size_t at = 0;
  bool waits = false;

  bool has_ended() const { return at == steps->size(); }
  const WarpStep& step() const { return (*steps)[at]; }
  double can_issue(const double* schedulers) const {
    const Instruction& instruction = *step().instruction;
    double time = next;
    for (const auto* registers : {&instruction.reads, &instruction.writes}) {
      for (const uint16_t number : *registers) {
        time = std::max(time, ready[number]);
      }
    }
    return std::max(time, schedulers[scheduler]);
  }
};

struct RunningBlock {
  std::vector<Warp> warps;
  double last_load = 0;  // before the first barrier: of the tensors
  bool has_synced = false;
  bool has_signaled = false;  // what it reads now, other blocks have written

  bool has_ended() const {
    return std::all_of(warps.begin(), warps.end(), [](const Warp& w) { return w.has_ended(); });
  }
  bool all_wait() const {
    return std::all_of(warps.begin(), warps.end(),
                       [](const Warp& w) { return w.waits || w.has_ended(); });
  }
};

class Multiprocessor {
 public:
  Multiprocessor(std::vector<std::vector<WarpSteps>> blocks, size_t num_registers, double bandwidth)
      : blocks_(std::move(blocks)), num_registers_(num_registers), bandwidth_(bandwidth) {}

  void run() {
    while (started_ < blocks_.size() && running_.size() < kResident) {
      running_.push_back(start(0));
    }
    while (!running_.empty()) {
      RunningBlock* block = nullptr;
      Warp* warp = nullptr;
      double time = 0;
      for (RunningBlock& one : running_) {
        for (Warp& other : one.warps) {
          if (!other.waits && !other.has_ended()) {
            const double possible = other.can_issue(schedulers_);
            if (warp == nullptr || possible < time) {
              block = &one, warp = &other, time = possible;
            }
          }
        }
      }
      issue(*block, *warp, time);
      if (block->has_ended()) {
        tail = end - block->last_load;
        if (started_ < blocks_.size()) {
          *block = start(time);
        } else {
          running_.erase(running_.begin() + (block - running_.data()));
        }
      }
    }
  }

  double end = 0;
  double tail = 0;  // of the block that ends last: from its last load of a tensor on

 private:
  RunningBlock start(double time) {
    RunningBlock block;
    const auto& warps = blocks_[started_++];
    for (size_t i = 0; i < warps.size(); ++i) {
      block.warps.push_back({&warps[i], i % kSchedulers, time});
      block.warps.back().ready.assign(num_registers_, time);
    }
    return block;
  }

  void issue(RunningBlock& block, Warp& warp, double time) {
    const WarpStep& step = warp.step();
    const Unit unit = step.instruction->unit;
    const Cost cost = cost_of(unit);
    double done = time + cost.latency;
    schedulers_[warp.scheduler] = time + cost.issue;
    warp.next = time + 1;
    if (is_shared(unit)) {
      shared_free_ = std::max(shared_free_, time) + step.turns;
      done = shared_free_ + (unit == Unit::kSharedLoad ? kSharedMemory : 0);
    } else if (is_global(unit)) {
      done = access(block, step, time);
    } else if (unit == Unit::kSignal) {
      warp.next = done;
      block.has_signaled = true;
    }
    for (const uint16_t number : step.instruction->writes) {
      warp.ready[number] = done;
    }
    ++warp.at;
    warp.waits = unit == Unit::kBarrier;
    if (block.all_wait()) {
      block.has_synced = true;
      for (Warp& other : block.warps) {
        other.waits = false;
        other.next = std::max(other.next, time + kRestart);
      }
    }
    end = std::max(end, warp.next);
  }

  double access(RunningBlock& block, const WarpStep& step, double time) {
    size_t missing = 0;
    for (const uint64_t sector : step.sectors) {
      missing += cached_.insert(sector).second;
    }
    const bool is_load = step.instruction->unit == Unit::kGlobalLoad;
    if (is_load && (missing == 0 || block.has_signaled)) {
      return time + kL2;
    }
    const size_t moved = is_load ? missing : step.sectors.size();
    memory_free_ = std::max(memory_free_, time) + moved * kSector / bandwidth_;
    if (!is_load) {
      return time + 4;
    }
    if (!block.has_synced) {
      block.last_load = std::max(block.last_load, memory_free_ + kMemory);
    }
    return memory_free_ + kMemory;
  }

  const std::vector<std::vector<WarpSteps>> blocks_;
  const size_t num_registers_;
  const double bandwidth_;
  size_t started_ = 0;
  std::vector<RunningBlock> running_;
  double schedulers_[kSchedulers] = {};
  double shared_free_ = 0;
  double memory_free_ = 0;
  std::unordered_set<uint64_t> cached_;
};

// --- Launches

double read_number(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return std::strtod(value == nullptr ? otherwise : value, nullptr);
}

std::map<std::string, Program>& programs() {
  static std::map<std::string, Program> all;
  return all;
}

// Records the blocks of the multiprocessor that has the last block of the grid: the last block
// finishes split reductions.
class Recorder : public LaunchObserver {
 public:
  void begin(const std::string& kernel) override {
    const auto found = programs().find(kernel);
    program_ = found == programs().end() ? nullptr : &found->second;
    name_ = kernel;
    blocks_.clear();
    steps_.clear();
    block_ = -1;
  }

  void begin_thread() override {
    const int64_t block = (int64_t{blockIdx.z} * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    if (block != block_) {
      finish_block();
      block_ = block;
      const auto multiprocessors =
          static_cast<int64_t>(read_number("STANDIN_MULTIPROCESSORS", "132"));
      const int64_t last = int64_t{gridDim.x} * gridDim.y * gridDim.z - 1;
      if (program_ != nullptr && block % multiprocessors == last % multiprocessors) {
        steps_.resize(blockDim.x * blockDim.y * blockDim.z);
      }
    }
  }

  void step(uint32_t number, uint64_t address) {
    if (!steps_.empty()) {
      steps_[(threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x].push_back(
          {number, address});
    }
  }

  void end() override {
    finish_block();
    if (blocks_.empty()) {
      return;
    }
    size_t num_registers = 0;
    for (const Instruction& instruction : *program_) {
      for (const uint16_t number : instruction.writes) {
        num_registers = std::max<size_t>(num_registers, number + 1);
      }
    }
    Multiprocessor multiprocessor(std::move(blocks_), num_registers,
                                  read_number("CYCLES_BANDWIDTH", "24"));
    multiprocessor.run();
    const std::string line = std::to_string(std::llround(multiprocessor.end)) + " " +
                             std::to_string(std::llround(multiprocessor.tail)) + " " + name_;
    standin_log("cycles", line.c_str());
    blocks_.clear();
  }

 private:
  void finish_block() {
    if (steps_.empty()) {
      return;
    }
    std::vector<WarpSteps> warps;
    for (size_t first = 0; first < steps_.size(); first += kWarpSize) {
      warps.push_back(join_lanes(*program_, &steps_[first],
                                 std::min<size_t>(kWarpSize, steps_.size() - first)));
    }
    blocks_.push_back(std::move(warps));
    steps_.clear();
  }

  std::string name_;
  const Program* program_ = nullptr;
  int64_t block_ = -1;
  std::vector<std::vector<ThreadStep>> steps_;  // of the block, if it is recorded
  std::vector<std::vector<WarpSteps>> blocks_;
};

Recorder recorder;
const bool kObserves = [] {
  observer = &recorder;
  return true;
}();

}  // namespace

ProgramRegistration::ProgramRegistration(const char* kernel, Program program) {
  programs()[kernel] = std::move(program);
}

void step(uint32_t number, uint64_t address) { recorder.step(number, address); }

}  // namespace syncbn::emulation::ptx
