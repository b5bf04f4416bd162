// The common part of all collectives: they check their arguments, and join the thread's group.
#pragma once

#include <functional>
#include <memory>

#include "exchange.h"
#include "groups.h"
#include "handles.h"
#include "standin.h"

namespace standin {

class Collective {
 public:
  Collective(const Call& call, ncclComm_t handle, cudaStream_t stream);

  int size() const { return communicator_->size(); }
  bool is_root() const { return call_.root == communicator_->rank(); }

  void check_input(const void* data) const;
  // `times` is the output's size divided by the input's.
  void add(void* output, size_t times, std::function<void(Communicator&)> body) const;

 private:
  Call call_;
  std::shared_ptr<Communicator> communicator_;
  cudaStream_t stream_;
};

inline const void* at(const void* data, size_t offset) {
  return static_cast<const unsigned char*>(data) + offset;
}
inline void* at(void* data, size_t offset) { return static_cast<unsigned char*>(data) + offset; }

}  // namespace standin
