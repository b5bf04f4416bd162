// The kernels that can be launched, and the names by which nvcc's code asks for them.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "standin.h"

namespace standin {

struct Kernel {
  std::vector<size_t> sizes;  // of its arguments, in bytes
  StandinKernel run;
  const void* data;
};

class Kernels {
 public:
  static Kernels& get();

  // Notes that nvcc's function for launching a kernel stands for this name.
  void add_name(const void* function, std::string name);

  // Notes how a kernel of this name runs.
  void add_kernel(std::string name, Kernel kernel);

  // Returns the name that a function stands for, or null. The pointer stays valid.
  const std::string* find_name(const void* function);

  // Returns the kernel of a name, or null.
  std::shared_ptr<const Kernel> find_kernel(const std::string& name);

 private:
  std::mutex mutex_;
  std::unordered_map<const void*, std::shared_ptr<const std::string>> names_;
  // Names of libraries that were loaded again at the address of others; launches may use them.
  std::vector<std::shared_ptr<const std::string>> former_names_;
  std::unordered_map<std::string, std::shared_ptr<const Kernel>> kernels_;
};

}  // namespace standin
