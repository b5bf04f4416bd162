// Operators for the CPU that torch has for CUDA only. Each is one piece of work in the stream.
#pragma once

#include <ATen/core/boxing/KernelFunction.h>

#include <string>
#include <utility>
#include <vector>

namespace standin {

using OwnKernels = std::vector<std::pair<std::string, c10::KernelFunction>>;

OwnKernels batch_norm_kernels();       // cuDNN's, and torch's backward
OwnKernels sync_batch_norm_kernels();  // torch.nn.SyncBatchNorm's
OwnKernels dropout_kernels();

}  // namespace standin
