// A model of a GPU's time: the instructions that the blocks of one multiprocessor execute, by
// their latencies. Kernels that tests/support/ptx_cycles.py translates call step() for each of
// them.
//
// A multiprocessor has four schedulers. Each issues, in each cycle, the next instruction of one of
// its warps, in program order, as soon as the instruction's registers are ready. Loads and stores
// of tensors share the multiprocessor's part of the memory's bandwidth; sectors that the launch has
// already accessed come from the L2 cache. A warp takes the path of its longest lane.
//
// CYCLES_BANDWIDTH  bytes of a multiprocessor in a cycle (24)
#pragma once

#include <cstdint>
#include <vector>

#include "ptx/registry.h"

namespace syncbn::emulation::ptx {

enum class Unit : uint8_t {
  kInteger,
  kWideInteger,
  kFloat,
  kDouble,
  kConvertDouble,
  kApproximation,
  kDivideInteger,
  kDivideFloat,
  kDivideDouble,
  kBranch,
  kBarrier,
  kSignal,  // fences and atomic operations
  kSharedLoad,
  kSharedStore,
  kGlobalLoad,
  kGlobalStore
};

struct Instruction {
  Unit unit;
  uint8_t num_bytes;  // of a thread's access to memory
  std::vector<uint16_t> reads, writes;
};

struct ProgramRegistration {
  ProgramRegistration(const char* kernel, std::vector<Instruction> program);
};

// The running thread executes an instruction of its kernel's program.
void step(uint32_t number, uint64_t address = 0);

}  // namespace syncbn::emulation::ptx
