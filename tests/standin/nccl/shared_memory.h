// Memory that processes share by its name.
#pragma once

#include <cstddef>
#include <string>

namespace standin {

class SharedMemory {
 public:
  SharedMemory(std::string name, size_t bytes);
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;
  ~SharedMemory();

  void* data() const { return data_; }
  // Removes the name; processes that have the memory keep it.
  void forget_name();

 private:
  std::string name_;
  size_t bytes_;
  void* data_ = nullptr;
};

}  // namespace standin
