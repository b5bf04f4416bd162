// Loads and stores of translated kernels, and their checks:
//
// - each access is aligned to its size;
// - shared memory is read after it was written, and no other thread reads or writes a written byte
//   before the next barrier;
// - a launch writes no address twice and reads no address that it has written, except in its
//   workspace, which it reads after it has written it, not by non-coherent loads (ld.global.nc);
// - a block fences before it signals others by an atomic operation, and again before it reads the
//   workspace;
// - each access is inside of an allocation of the running device, where allocations are known.
//
// Tests that call launchers name the workspace, the range `unwritten`. The stand-in of the CUDA
// runtime does not know it: there each address that a launch reads after writing it is taken for
// workspace.
#pragma once

#include <bitset>
#include <unordered_map>
#include <vector>

#include "threads/grid.h"

namespace emulation::ptx {

template <typename T, int kLength>
struct Values {
  T values[kLength];
};

template <typename V>
inline void check_aligned(uint64_t address, const char* what) {
  if (address % sizeof(V) != 0) {
    Block::current->fail_thread(std::string(what) + " " + std::to_string(sizeof(V)) +
                                " bytes at an address that is not aligned to them");
  }
}

// Addresses are numbers in PTX.
inline unsigned char* to_pointer(uint64_t address) {
  return reinterpret_cast<unsigned char*>(address);  // NOLINT(performance-no-int-to-ptr)
}

// --- Parameters

template <typename T, int kLength>
inline Values<T, kLength> load_param(uint64_t address) {
  Values<T, kLength> result;
  std::memcpy(&result, to_pointer(address), sizeof(result));
  return result;
}

// --- Shared memory

// The last accesses to a byte: the threads and the phases.
struct SharedByte {
  const Thread* writer = nullptr;
  const Thread* reader = nullptr;
  uint64_t written = 0;
  uint64_t read = 0;
};

inline SharedByte* shared_bytes_at(uint32_t address, size_t size) {
  static std::unordered_map<const Block*, std::vector<SharedByte>> of_block;
  auto& bytes = of_block[Block::current];
  if (bytes.size() < address + size) {
    bytes.resize(address + size);
  }
  return bytes.data() + address;
}

template <typename V>
inline unsigned char* shared_access(uint32_t address, const char* what) {
  check_aligned<V>(address, what);
  const size_t end = size_t{address} + sizeof(V);
  return static_cast<unsigned char*>(Block::current->shared(end)) + address;
}

template <typename T, int kLength>
inline Values<T, kLength> load_shared(uint32_t address) {
  Values<T, kLength> result;
  const auto* from = shared_access<decltype(result)>(address, "reads");
  const uint64_t phase = Block::current->phase();
  SharedByte* const bytes = shared_bytes_at(address, sizeof(result));
  for (size_t i = 0; i < sizeof(result); ++i) {
    SharedByte& byte = bytes[i];
    if (byte.written < Block::current->first_phase()) {
      Block::current->fail_thread("reads shared memory that its block has not written");
    }
    if (byte.written == phase && byte.writer != Block::current_thread) {
      Block::current->fail_thread(
          "reads shared memory that another thread writes before a barrier");
    }
    const bool by_others = byte.read == phase && byte.reader != Block::current_thread;
    byte.reader = by_others ? nullptr : Block::current_thread;
    byte.read = phase;
  }
  std::memcpy(&result, from, sizeof(result));
  return result;
}

template <typename T, int kLength>
inline void store_shared(uint32_t address, Values<T, kLength> values) {
  auto* to = shared_access<decltype(values)>(address, "writes");
  const uint64_t phase = Block::current->phase();
  SharedByte* const bytes = shared_bytes_at(address, sizeof(values));
  for (size_t i = 0; i < sizeof(values); ++i) {
    SharedByte& byte = bytes[i];
    if ((byte.written == phase && byte.writer != Block::current_thread) ||
        (byte.read == phase && byte.reader != Block::current_thread)) {
      Block::current->fail_thread(
          "writes shared memory that another thread reads or writes before a barrier");
    }
    byte.writer = Block::current_thread;
    byte.written = phase;
  }
  std::memcpy(to, &values, sizeof(values));
}

// --- Global memory

// The bytes that the running launch has written. An aligned access never crosses a page.
class Written {
 public:
  void clear() {
    pages_.clear();
    last_ = nullptr;
  }

  // Returns whether any of these bytes was written already; they are now.
  bool add(uint64_t address, size_t size) {
    Page& page = page_of(address);
    bool before = false;
    for (size_t i = 0; i < size; ++i) {
      auto bit = page[address % kPageBytes + i];
      before |= bit;
      bit = true;
    }
    return before;
  }

  size_t count(uint64_t address, size_t size) {
    const Page& page = page_of(address);
    size_t result = 0;
    for (size_t i = 0; i < size; ++i) {
      result += page[address % kPageBytes + i];
    }
    return result;
  }

 private:
  static constexpr size_t kPageBytes = 4096;
  using Page = std::bitset<kPageBytes>;

  Page& page_of(uint64_t address) {
    const uint64_t number = address / kPageBytes;
    if (last_ == nullptr || number != last_number_) {
      last_ = &pages_[number];
      last_number_ = number;
    }
    return *last_;
  }

  std::unordered_map<uint64_t, Page> pages_;
  Page* last_ = nullptr;
  uint64_t last_number_ = 0;
};

inline Written written;

// Whether `unwritten` is the workspace of the launch.
inline bool names_workspace = true;

// Throws unless the bytes are inside of an allocation; null where allocations are not known.
inline void (*check_allocation)(uint64_t address, size_t size, const char* what) = nullptr;

template <typename V>
inline void check_global(uint64_t address, const char* what) {
  check_aligned<V>(address, what);
  if (check_allocation != nullptr) {
    check_allocation(address, sizeof(V), what);
  }
}

template <typename T, int kLength>
inline Values<T, kLength> load_global(uint64_t address) {
  Values<T, kLength> result;
  check_global<decltype(result)>(address, "reads");
  const size_t num_written = written.count(address, sizeof(result));
  const bool in_workspace =
      names_workspace ? unwritten.begin <= address && address < unwritten.end : num_written > 0;
  if (in_workspace && num_written < sizeof(result)) {
    Block::current->fail_thread("reads memory that the launch has yet to write");
  }
  if (!in_workspace && num_written > 0) {
    Block::current->fail_thread("reads memory that the launch has written");
  }
  if (in_workspace && !Block::current->has_acquired()) {
    Block::current->fail_thread("reads what other blocks write without a signal and a fence");
  }
  std::memcpy(&result, to_pointer(address), sizeof(result));
  return result;
}

// ld.global.nc: its cache does not see other threads' stores.
template <typename T, int kLength>
inline Values<T, kLength> load_noncoherent_global(uint64_t address) {
  if (written.count(address, kLength * sizeof(T)) > 0) {
    Block::current->fail_thread("reads by a non-coherent load what the launch has written");
  }
  return load_global<T, kLength>(address);
}

template <typename T, int kLength>
inline void store_global(uint64_t address, Values<T, kLength> values) {
  check_global<decltype(values)>(address, "writes");
  if (written.add(address, sizeof(values))) {
    Block::current->fail_thread("writes memory that the launch has written already");
  }
  Block::current->note_store();
  std::memcpy(to_pointer(address), &values, sizeof(values));
}

inline uint32_t atomic_inc(uint64_t address, uint32_t limit) {
  check_global<uint32_t>(address, "signals with");
  auto* counter = reinterpret_cast<uint32_t*>(to_pointer(address));
  const uint32_t old = *counter;
  *counter = old >= limit ? 0 : old + 1;
  Block::current->signal();
  return old;
}

}  // namespace emulation::ptx
