// A rank's end of a communicator: it waits for other ranks here, meets them, and fails with them.
#pragma once

#include <nccl.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "call.h"
#include "failure.h"
#include "layout.h"
#include "processes.h"
#include "shared_memory.h"
#include "stream_order.h"

namespace standin {

class Communicator {
 public:
  // Waits until all ranks have joined under this name.
  Communicator(const std::string& name, int size, int rank);

  int rank() const { return rank_; }
  int size() const { return size_; }
  const Layout& layout() const { return layout_; }
  StreamOrder& order() { return order_; }

  // Waits for the other ranks. Calls must be alike; without one, the meeting continues the previous
  // call.
  void meet(const Call* call);
  // The number of the next meeting, which is the same on all ranks.
  uint64_t next_meeting() const { return num_meetings_ + 1; }

  // Gives the other hosts this rank's choice for a split; waits for theirs, but for no stream.
  std::vector<Choice> choose(const Choice& mine);
  std::string name_of_split(int color) const {
    return name_ + "-" + std::to_string(num_splits_) + "-" + std::to_string(color);
  }

  // Throws if this rank has aborted, or if any rank has failed.
  void check() const;
  // The asynchronous error.
  ncclResult_t error() const;

  // Runs one piece of work at a time; a second one at the same time fails.
  void run_alone(const Call& call, const std::function<void()>& body);
  // Ends this rank's work, also what has not begun, and waits until none runs.
  void abort();

 private:
  void join();
  void compare(uint64_t meeting, const Call& call);
  // Waits, mostly asleep. `diagnose` is called at intervals and may throw.
  void wait(const std::function<bool()>& is_ready, const std::function<void()>& diagnose);
  // Wakes a rank that waits.
  void ring(int rank) { layout_.member(rank).bell.ring(); }
  void ring_all();
  // Fails on all ranks, with a message about this rank.
  [[noreturn]] void fail(ncclResult_t code, const std::string& words);
  [[noreturn]] void fail_without(int rank, const std::string& call);

  std::string name_;
  int size_, rank_;
  SharedMemory memory_;
  Layout layout_;
  std::vector<std::unique_ptr<Process>> processes_;
  StreamOrder order_;
  uint64_t num_meetings_ = 0;
  uint64_t num_splits_ = 0;
  std::atomic<bool> is_aborted_{false};
  std::mutex running_;
};

}  // namespace standin
