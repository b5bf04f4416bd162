#include "adapter.h"

#include <cuda_runtime_api.h>

#include <map>
#include <mutex>

#include "counters.h"

namespace syncbn {
namespace {

cudaStream_t current_stream(int32_t device) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  return static_cast<cudaStream_t>(stream);
}

// Returns the error of an earlier operation, which makes CUDA refuse allocations, or cudaSuccess.
cudaError_t find_earlier_error(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cudaError_t error = cudaStreamIsCapturing(stream, &status);
  if (error == cudaSuccess && status == cudaStreamCaptureStatusInvalidated) {
    error = cudaErrorStreamCaptureInvalidated;
  }
  if (error == cudaSuccess && status == cudaStreamCaptureStatusNone) {
    error = cudaStreamQuery(stream);  // forbidden in a capture
  }
  cudaGetLastError();  // resets the error: the next launch would report it
  return error == cudaErrorNotReady ? cudaSuccess : error;
}

}  // namespace

void throw_allocation_failed(int64_t num_bytes, const Tensor& like) {
  const int32_t device = like.get_device_index();
  const cudaError_t error = find_earlier_error(current_stream(device));
  SYNCBN_CHECK(error == cudaSuccess, "syncbn cannot allocate ", num_bytes, " bytes on CUDA device ",
               device,
               ", because an earlier operation on it, perhaps not syncbn's, has failed "
               "(CUDA_LAUNCH_BLOCKING=1 shows which): ",
               cudaGetErrorString(error));
  detail::throw_error("CUDA out of memory. syncbn tried to allocate ", num_bytes,
                      " bytes on device ", device);
}

}  // namespace syncbn

namespace syncbn::cuda {
namespace {

// The dispatcher calls a CUDA operator if any tensor is on CUDA.
int32_t check_cuda(const Tensor& input) {
  SYNCBN_CHECK(input.is_cuda(),
               "expected input to be on the device of the other tensors, which is ",
               "a CUDA device");
  return input.get_device_index();
}

// Cached per device.
int count_multiprocessors(int device) {
  static std::mutex mutex;
  static std::map<int, int> known;
  const std::lock_guard<std::mutex> lock(mutex);
  int& number = known[device];
  if (number == 0) {
    const cudaError_t error =
        cudaDeviceGetAttribute(&number, cudaDevAttrMultiProcessorCount, device);
    if (error != cudaSuccess) {
      cudaGetLastError();  // resets the error: the next launch would report it
    }
    SYNCBN_CHECK(error == cudaSuccess, "syncbn cannot use CUDA device ", device, ": ",
                 cudaGetErrorString(error));
  }
  return number;
}

}  // namespace

Device::Device(const Tensor& input)
    : guard_(check_cuda(input)),
      index_(input.get_device_index()),
      stream_(current_stream(index_)),
      multiprocessors_(count_multiprocessors(index_)) {}

Workspace Device::make_workspace(const Plan& plan, const Tensor& input,
                                 std::vector<Tensor>& keep_alive) const {
  if (plan.num_counters() == 0) {
    return {nullptr, nullptr};
  }
  keep_alive.push_back(allocate_vector(plan.num_partials(), ScalarType::Double, input));
  auto* partials = static_cast<double*>(keep_alive.back().mutable_data_ptr());
  unsigned int* counters =
      take_counters(index_, static_cast<cudaStream_t>(stream_), plan.num_counters());
  if (counters == nullptr) {  // rare, such as after hundreds of captured models: one more launch
    keep_alive.push_back(allocate_vector(plan.num_counters(), ScalarType::Int, input));
    counters = static_cast<unsigned int*>(keep_alive.back().mutable_data_ptr());
    const cudaError_t error = cudaMemsetAsync(counters, 0, plan.num_counters() * sizeof(*counters),
                                              static_cast<cudaStream_t>(stream_));
    cudaGetLastError();  // resets the error: the next launch would report it
    SYNCBN_CHECK(error == cudaSuccess,
                 "syncbn: cudaMemsetAsync failed: ", cudaGetErrorString(error));
  }
  return {partials, counters};
}

ChannelVector to_channel_input(const std::optional<Tensor>& tensor) {
  if (!tensor.has_value()) {
    return {};
  }
  void* const data = const_cast<void*>(tensor->const_data_ptr());
  return {data, tensor->stride(0), to_dtype(tensor->scalar_type())};
}

ChannelVector to_channel_output(const std::optional<Tensor>& tensor) {
  if (!tensor.has_value()) {
    return {};
  }
  return {tensor->mutable_data_ptr(), tensor->stride(0), to_dtype(tensor->scalar_type())};
}

void check_no_mask(const std::optional<Tensor>& mask) {
  SYNCBN_CHECK(!mask.has_value(), "expected no mask; masks are for CPU tensors");
}

const void* to_data(const std::optional<Tensor>& tensor) {
  return tensor.has_value() ? tensor->const_data_ptr() : nullptr;
}

double* to_status(const std::optional<Tensor>& tensor) {
  if (!tensor.has_value()) {
    return nullptr;
  }
  SYNCBN_CHECK(tensor->scalar_type() == ScalarType::Double && tensor->numel() == 1,
               "expected status to be one float64");
  return static_cast<double*>(tensor->mutable_data_ptr());
}

}  // namespace syncbn::cuda
