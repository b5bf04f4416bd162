// As in NCCL, a group's collectives of a communicator run before its sends and receives, which are
// one piece of work.
#include "groups.h"

#include <exception>
#include <string>
#include <thread>

#include "standin.h"

namespace standin {
namespace {

Work make_work(std::vector<Transfer> transfers) {
  Work work;
  work.call = {Kind::kExchange};
  bool all_alike = true;
  for (const Transfer& transfer : transfers) {
    all_alike = all_alike && transfer.call.kind == transfers[0].call.kind;
    if (transfer.call.kind == Kind::kReceive) {
      work.outputs.push_back({transfer.data, bytes_of(transfer.call)});
    }
  }
  if (transfers.size() == 1) {
    work.call = transfers[0].call;
  }
  work.name = name_of(all_alike ? transfers[0].call.kind : Kind::kExchange);
  work.body = [all = std::move(transfers)](Communicator& communicator) {
    run_transfers(communicator, all);
  };
  return work;
}

}  // namespace

Group& Group::of_thread() {
  static thread_local Group group;
  return group;
}

Group::Part& Group::part_of(const std::shared_ptr<Communicator>& communicator) {
  for (Part& part : parts_) {
    if (part.communicator == communicator) {
      return part;
    }
  }
  parts_.emplace_back();
  parts_.back().communicator = communicator;
  return parts_.back();
}

void Group::add(const std::shared_ptr<Communicator>& communicator, cudaStream_t stream, Work work) {
  if (depth_ == 0) {
    enqueue(communicator, stream, std::move(work));
  } else {
    part_of(communicator).collectives.emplace_back(stream, std::move(work));
  }
}

void Group::add(const std::shared_ptr<Communicator>& communicator, cudaStream_t stream,
                const Transfer& transfer) {
  if (depth_ == 0) {
    enqueue(communicator, stream, make_work({transfer}));
    return;
  }
  Part& part = part_of(communicator);
  if (!part.transfers.empty() && part.stream != stream) {
    throw Failure(ncclInvalidUsage,
                  "sends and receives of one group on two streams are not implemented");
  }
  part.stream = stream;
  part.transfers.push_back(transfer);
}

void Group::end() {
  if (depth_ == 0) {
    throw Failure(ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
  }
  if (--depth_ == 0) {
    std::vector<Part> parts = std::move(parts_);
    parts_.clear();
    enqueue_parts(parts);
  }
}

void Group::enqueue_part(Part& part) {
  for (auto& [stream, work] : part.collectives) {
    enqueue(part.communicator, stream, std::move(work));
  }
  if (!part.transfers.empty()) {
    enqueue(part.communicator, part.stream, make_work(std::move(part.transfers)));
  }
}

// Communicators of one group may be ranks that wait for each other, and a stream may run its work
// within the call that enqueues it: each has a thread.
void Group::enqueue_parts(std::vector<Part>& parts) {
  if (parts.size() == 1) {
    enqueue_part(parts[0]);
    return;
  }
  std::vector<std::exception_ptr> errors(parts.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < parts.size(); ++i) {
    threads.emplace_back([&parts, &errors, i] {
      try {
        cudaSetDevice(parts[i].communicator->device());
        enqueue_part(parts[i]);
      } catch (...) {
        errors[i] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  for (const std::exception_ptr& error : errors) {
    if (error != nullptr) {
      std::rethrow_exception(error);
    }
  }
}

}  // namespace standin

STANDIN_API ncclResult_t ncclGroupStart() {
  standin::Group::of_thread().start();
  return ncclSuccess;
}

STANDIN_API ncclResult_t ncclGroupEnd() {
  return standin::guarded([] { standin::Group::of_thread().end(); });
}
