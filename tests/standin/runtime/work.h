// Work of streams: the action of a launch, a copy or a graph, once its turn has come.
//
// Work is shared by the queues and graphs that hold it and is dropped with the last of them. Like
// CUDA's host functions, it must not call the runtime.
#pragma once

#include <functional>
#include <memory>

#include "standin.h"

namespace standin {

class Work {
 public:
  explicit Work(const StandinWork& work) : work_(work) {}
  Work(const Work&) = delete;
  Work& operator=(const Work&) = delete;
  ~Work();

  const char* kind() const { return work_.kind; }
  const char* name() const { return work_.name; }

  // Adds a line to the log if it is a kernel, a copy or a collective.
  void log() const;

  // Runs it, unless it is a kernel and STANDIN_KERNELS says to skip those. Throws a
  // std::runtime_error with its name and what was wrong.
  void run() const;

 private:
  StandinWork work_;
};

using WorkPointer = std::shared_ptr<const Work>;

// Makes work of a function; the kind and the name must be literals.
WorkPointer make_work(const char* kind, const char* name, std::function<void()> function);

// Runs work of a device. An exception fails the device; on a failed device nothing runs.
void run_on_device(int device, const Work& work);

// Refuses a call to the runtime by work that runs.
cudaError_t refuse_in_work(const char* name);

}  // namespace standin
