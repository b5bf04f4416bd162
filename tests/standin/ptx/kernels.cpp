// Offers the translated kernels to the stand-in's runtime. One launch runs at a time.
//
// STANDIN_BLOCKS  the order of blocks and threads: forward (the default), reverse or shuffled

#include <cstdlib>
#include <mutex>
#include <stdexcept>

#include "ptx/memory.h"
#include "ptx/registry.h"

#define STANDIN_WITHOUT_CUDA
#include "standin.h"

namespace emulation::ptx {
namespace {

Order chosen_order() {
  const char* name = std::getenv("STANDIN_BLOCKS");
  const std::string chosen = name == nullptr ? "forward" : name;
  if (chosen == "forward") {
    return Order::kForward;
  }
  if (chosen == "reverse") {
    return Order::kReverse;
  }
  if (chosen == "shuffled") {
    return Order::kShuffled;
  }
  throw std::runtime_error("expected STANDIN_BLOCKS to be forward, reverse or shuffled, but got " +
                           chosen);
}

// The allocations that the running launch has used: a lookup takes longer than an access.
std::vector<Range> used_allocations;

void check_in_allocation(uint64_t address, size_t size, const char* what) {
  for (const Range& range : used_allocations) {
    if (range.begin <= address && address + size <= range.end) {
      return;
    }
  }
  Range range{};
  int device = -1;
  if (!standin_find_allocation(address, &range.begin, &range.end, &device) ||
      address + size > range.end) {
    Block::current->fail_thread(std::string(what) + " memory outside of all allocations");
  }
  if (device >= 0 && device != standin_running_device()) {
    Block::current->fail_thread(std::string(what) + " memory of another device");
  }
  used_allocations.push_back(range);
}

void run(const void* kernel, const unsigned* grid, const unsigned* block, size_t shared_bytes,
         const void* const* arguments) {
  static std::mutex running;
  const std::lock_guard<std::mutex> lock(running);
  order = chosen_order();
  used_allocations.clear();
  launch(*static_cast<const Kernel*>(kernel), {grid[0], grid[1], grid[2]},
         {block[0], block[1], block[2]}, shared_bytes, arguments);
}

// The linker puts this file behind the translated ones, whose kernels are registered by then.
const bool kOffered = [] {
  names_workspace = false;
  check_allocation = check_in_allocation;
  for_each_kernel([](const std::string& name, const Kernel& kernel) {
    std::vector<size_t> sizes;
    for (const Parameter& parameter : kernel.parameters) {
      sizes.push_back(parameter.num_bytes);
    }
    standin_register_kernel(name.c_str(), sizes.data(), sizes.size(), run, &kernel);
  });
  return true;
}();

}  // namespace
}  // namespace emulation::ptx
