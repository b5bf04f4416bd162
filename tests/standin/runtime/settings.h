// The settings of the stand-in, which environment variables give. They are read once.
//
// STANDIN_DEVICES   the number of devices (1); CUDA_VISIBLE_DEVICES may leave fewer
// STANDIN_MEMORY    bytes of each device (4 GiB)
// STANDIN_MULTIPROCESSORS   of each device (132)
// STANDIN_STREAMS   inline: work runs within the call that enqueues it (the default)
//                   async: each stream has a thread, which runs work as soon as it can
//                   late: as async, but work waits until someone needs it or STANDIN_DELAY_MS (50)
// STANDIN_KERNELS   skip: launches do nothing, to measure the host's part of them
// STANDIN_TRACE     1: what is enqueued, errors and waits of the host are written to stderr
#pragma once

#include <chrono>
#include <cstddef>
#include <string>

namespace standin {

enum class StreamMode { kInline, kAsync, kLate };

struct Settings {
  int num_devices;
  size_t device_bytes;
  int num_multiprocessors;
  StreamMode streams;
  std::chrono::milliseconds delay;
  bool skips_kernels;
  bool traces;
};

const Settings& settings();

// Writes a line to stderr if STANDIN_TRACE is set.
void trace(const std::string& words);

}  // namespace standin
