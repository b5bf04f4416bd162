// Collectives that compute, and the operations that callers make for them.
#include "collective.h"
#include "reduction.h"

namespace standin {
namespace {

using Write = std::function<void(unsigned char* slot, size_t offset, size_t length)>;
using Read = std::function<void(const Slots& slots, size_t offset, size_t length)>;

// Reads the sum of what lies at `part` in all slots.
Read read_sum(const Communicator& communicator, size_t part, void* receive, const Call& call,
              const Reduction& reduction) {
  return [=, size = communicator.size()](const Slots& slots, size_t offset, size_t length) {
    std::vector<const void*> parts;
    for (int rank = 0; rank < size; ++rank) {
      parts.push_back(slots.of(rank) + part);
    }
    reduce(parts, at(receive, offset), length / size_of(call.type), call.type, reduction);
  };
}

// `call` is an all_reduce or a reduce.
void reduce_all(const void* send, void* receive, Call call, ncclRedOp_t op, ncclComm_t handle,
                cudaStream_t stream) {
  const Reduction reduction = Reductions::instance().find(op, call.type);
  call.op = reduction.number();
  const Collective collective(call, handle, stream);
  const bool has_result = call.kind == Kind::kAllReduce || collective.is_root();
  collective.check_input(send, 1);
  collective.add(receive, has_result ? 1 : 0, [=](Communicator& communicator) {
    Exchange steps;
    steps.write = [=](unsigned char* slot, size_t offset, size_t length) {
      copy_multiplied(at(send, offset), slot, length / size_of(call.type), call.type, reduction);
    };
    if (has_result) {
      steps.read = read_sum(communicator, 0, receive, call, reduction);
    }
    exchange(communicator, call, bytes_of(call), 1, steps);
  });
}

void reduce_scatter(const void* send, void* receive, Call call, ncclRedOp_t op, ncclComm_t handle,
                    cudaStream_t stream) {
  const Reduction reduction = Reductions::instance().find(op, call.type);
  call.op = reduction.number();
  const Collective collective(call, handle, stream);
  collective.check_input(send, collective.size());
  collective.add(receive, 1, [=](Communicator& communicator) {
    const int size = communicator.size();
    const size_t distance = part_bytes(communicator, size);
    Exchange steps;
    steps.write = [=](unsigned char* slot, size_t offset, size_t length) {
      for (int rank = 0; rank < size; ++rank) {
        copy_multiplied(at(send, rank * bytes_of(call) + offset), slot + rank * distance,
                        length / size_of(call.type), call.type, reduction);
      }
    };
    steps.read = read_sum(communicator, communicator.rank() * distance, receive, call, reduction);
    exchange(communicator, call, bytes_of(call), size, steps);
  });
}

}  // namespace
}  // namespace standin

using standin::guarded;
using standin::Kind;

STANDIN_API ncclResult_t ncclAllReduce(const void* send, void* receive, size_t count,
                                       ncclDataType_t type, ncclRedOp_t op, ncclComm_t communicator,
                                       cudaStream_t stream) {
  return guarded([&] {
    standin::reduce_all(send, receive, {Kind::kAllReduce, type, count}, op, communicator, stream);
  });
}

STANDIN_API ncclResult_t ncclReduce(const void* send, void* receive, size_t count,
                                    ncclDataType_t type, ncclRedOp_t op, int root,
                                    ncclComm_t communicator, cudaStream_t stream) {
  return guarded([&] {
    standin::reduce_all(send, receive, {Kind::kReduce, type, count, -1, root}, op, communicator,
                        stream);
  });
}

STANDIN_API ncclResult_t ncclReduceScatter(const void* send, void* receive, size_t count,
                                           ncclDataType_t type, ncclRedOp_t op,
                                           ncclComm_t communicator, cudaStream_t stream) {
  return guarded([&] {
    standin::reduce_scatter(send, receive, {Kind::kReduceScatter, type, count}, op, communicator,
                            stream);
  });
}

STANDIN_API ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar,
                                                  ncclDataType_t type,
                                                  ncclScalarResidence_t residence, ncclComm_t) {
  return guarded([&] { *op = standin::Reductions::instance().add(scalar, type, residence); });
}

STANDIN_API ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t) {
  return guarded([&] { standin::Reductions::instance().remove(op); });
}
