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

  const std::string& name() const { return name_; }
  int rank() const { return rank_; }
  int size() const { return size_; }
  int device() const { return device_; }
  const Layout& layout() const { return layout_; }
  StreamOrder& order() { return order_; }

  // Numbers the communicators made from this one; all ranks count alike.
  int next_child() { return ++num_children_; }
  // For calls in which the hosts meet.
  std::unique_lock<std::mutex> lock_host() { return std::unique_lock<std::mutex>(host_); }

  // Waits for the other ranks; returns the meeting's number, which is the same on all ranks. Calls
  // must be alike; without one, the meeting continues the previous call.
  uint64_t meet(Lane lane, const Call* call = nullptr);
  // The number of the next meeting.
  uint64_t next_meeting(Lane lane) const { return num_meetings_[lane] + 1; }
  // Whether a rank has come to a later meeting of the streams' work than this rank.
  bool is_ahead(int rank) const;
  Call announced_by(int rank) const;

  // Waits, mostly asleep. `diagnose` is called at intervals and may throw.
  void wait(const std::function<bool()>& is_ready, const std::function<void()>& diagnose);
  // Wakes a rank that waits.
  void ring(int rank) { layout_.member(rank).bell.ring(); }
  bool has_died(int rank) const { return processes_[rank]->has_ended(); }
  std::string describe_process(int rank) const;

  // Fails on all ranks, with a message about this rank.
  [[noreturn]] void fail(ncclResult_t code, const std::string& words);
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
  void compare(Lane lane, uint64_t meeting, const Call& call);
  void ring_all();

  std::string name_;
  int size_, rank_, device_ = 0;
  SharedMemory memory_;
  Layout layout_;
  std::vector<std::unique_ptr<Process>> processes_;
  StreamOrder order_;
  uint64_t num_meetings_[kNumLanes] = {};
  std::atomic<int> num_children_{0};
  std::atomic<bool> is_aborted_{false};
  std::mutex running_;
  std::mutex host_;
};

}  // namespace standin
