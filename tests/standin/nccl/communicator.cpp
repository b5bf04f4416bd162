// How ranks join and meet.
#include "communicator.h"

#include <cuda_runtime_api.h>
#include <unistd.h>

namespace standin {
namespace {

int checked_size(int size, int rank) {
  if (size < 1 || size > kMaxRanks) {
    throw Failure(ncclInvalidArgument, "a communicator of " + std::to_string(size) +
                                           " ranks: there may be 1 to " +
                                           std::to_string(kMaxRanks));
  }
  if (rank < 0 || rank >= size) {
    throw Failure(ncclInvalidArgument, "rank " + std::to_string(rank) + " of a communicator of " +
                                           std::to_string(size) + " ranks");
  }
  return size;
}

}  // namespace

Communicator::Communicator(const std::string& name, int size, int rank)
    : name_(name),
      size_(checked_size(size, rank)),
      rank_(rank),
      memory_(name, Layout::total_bytes(size)),
      layout_(memory_.data(), size) {
  cudaGetDevice(&device_);
  join();
}

void Communicator::join() {
  Header& header = layout_.header();
  int32_t theirs = 0;
  if (!header.size.compare_exchange_strong(theirs, size_) && theirs != size_) {
    throw Failure(ncclInvalidArgument, "rank " + std::to_string(rank_) +
                                           " joins a communicator of " + std::to_string(size_) +
                                           " ranks, another rank one of " + std::to_string(theirs));
  }
  int32_t nobody = 0;
  if (!layout_.member(rank_).process.compare_exchange_strong(nobody, getpid())) {
    throw Failure(ncclInvalidArgument,
                  "two processes join a communicator as rank " + std::to_string(rank_));
  }
  ++header.joined;
  ring_all();
  wait([&] { return header.joined == size_; },
       [&] {
         for (int rank = 0; rank < size_; ++rank) {
           const pid_t process = layout_.member(rank).process;
           if (process != 0 && Process(process).has_ended()) {
             memory_.forget_name();
             fail(ncclRemoteError, "rank " + std::to_string(rank) + " (process " +
                                       std::to_string(process) + ") died before all had joined");
           }
         }
       });
  memory_.forget_name();
  for (int rank = 0; rank < size_; ++rank) {
    processes_.push_back(std::make_unique<Process>(layout_.member(rank).process));
  }
}

uint64_t Communicator::meet(Lane lane, const Call* call) {
  check();
  const uint64_t meeting = ++num_meetings_[lane];
  Place& mine = layout_.place(lane, rank_);
  if (call != nullptr) {
    mine.announced[meeting % 2] = *call;
  }
  mine.arrived = meeting;
  if (call != nullptr) {
    compare(lane, meeting, *call);
  }
  std::atomic<uint64_t>& arrivals = layout_.counter(lane).arrivals;
  const uint64_t all = meeting * size_;
  if (++arrivals == all) {
    ring_all();
    return meeting;
  }
  const Call last = mine.announced[meeting % 2];
  wait([&] { return arrivals >= all; },
       [&] {
         for (int rank = 0; rank < size_; ++rank) {
           const std::atomic<uint64_t>& theirs = layout_.place(lane, rank).arrived;
           if (theirs < meeting && has_died(rank) && theirs < meeting) {
             fail(ncclRemoteError, "rank " + std::to_string(rank_) + " waits in " + describe(last) +
                                       " for " + describe_process(rank) + ", which has died");
           }
         }
       });
  return meeting;
}

// The later of two ranks sees the earlier one's call, so no rank needs to wait for all.
void Communicator::compare(Lane lane, uint64_t meeting, const Call& call) {
  for (int rank = 0; rank < size_; ++rank) {
    const Place& place = layout_.place(lane, rank);
    if (place.arrived != meeting) {
      continue;
    }
    const Call theirs = place.announced[meeting % 2];
    if (!is_alike(call, theirs)) {
      fail(ncclInvalidUsage, "rank " + std::to_string(rank_) + " calls " + describe(call) +
                                 ", but rank " + std::to_string(rank) + " calls " +
                                 describe(theirs));
    }
  }
}

bool Communicator::is_ahead(int rank) const {
  return layout_.place(kDeviceLane, rank).arrived > num_meetings_[kDeviceLane];
}

Call Communicator::announced_by(int rank) const {
  return layout_.place(kDeviceLane, rank).announced[next_meeting(kDeviceLane) % 2];
}

std::string Communicator::describe_process(int rank) const {
  return "rank " + std::to_string(rank) + " (process " + std::to_string(processes_[rank]->id()) +
         ")";
}

}  // namespace standin
