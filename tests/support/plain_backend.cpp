// The stand-in device's backend of torch.distributed: gloo, on the memory that the tensors have on
// the host. Like the backends of devices, it refuses tensors of the host.

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "plain_device.h"

PYBIND11_DECLARE_HOLDER_TYPE(T, c10::intrusive_ptr<T>, true)

namespace {

using Tensors = std::vector<at::Tensor>;
using Pending = c10::intrusive_ptr<c10d::Work>;

Tensors to_host(const Tensors& tensors) {
  Tensors converted;
  for (const at::Tensor& tensor : tensors) {
    TORCH_CHECK(plain::is_ours(tensor), "expected tensors on the stand-in device");
    converted.push_back(plain::to_host(tensor));
  }
  return converted;
}

class Backend final : public c10d::Backend {
 public:
  explicit Backend(c10::intrusive_ptr<c10d::Backend> gloo)
      : c10d::Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}

  const std::string getBackendName() const override { return "plain"; }

  Pending allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    Tensors host = to_host(tensors);
    return gloo_->allreduce(host, options);
  }
  Pending allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override {
    std::vector<Tensors> host_outputs;
    for (const Tensors& tensors : outputs) {
      host_outputs.push_back(to_host(tensors));
    }
    Tensors host_inputs = to_host(inputs);
    return gloo_->allgather(host_outputs, host_inputs, options);
  }
  Pending _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override {
    Tensors host = to_host({output, input});
    return gloo_->_allgather_base(host[0], host[1], options);
  }
  Pending allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override {
    Tensors host_outputs = to_host(outputs);
    Tensors host_inputs = to_host(inputs);
    return gloo_->allgather_into_tensor_coalesced(host_outputs, host_inputs, options);
  }
  void setSequenceNumberForGroup() override { gloo_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo_->getSequenceNumberForGroup(); }

 private:
  c10::intrusive_ptr<c10d::Backend> gloo_;
};

}  // namespace

PYBIND11_MODULE(plain_device, m) {
  m.def("backend", [](const c10::intrusive_ptr<c10d::Backend>& gloo) {
    return c10::intrusive_ptr<c10d::Backend>(c10::make_intrusive<Backend>(gloo));
  });
}
