// How ranks join and meet.
#include "communicator.h"

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

void Communicator::meet(const Call* call) {
  check();
  const uint64_t meeting = ++num_meetings_;
  Member& mine = layout_.member(rank_);
  if (call != nullptr) {
    mine.announced[meeting % 2] = *call;
  }
  mine.arrived = meeting;
  if (call != nullptr) {
    compare(meeting, *call);
  }
  std::atomic<uint64_t>& arrivals = layout_.header().arrivals;
  const uint64_t all = meeting * size_;
  if (++arrivals == all) {
    ring_all();
    return;
  }
  const Call last = mine.announced[meeting % 2];
  wait([&] { return arrivals >= all; },
       [&] {
         for (int rank = 0; rank < size_; ++rank) {
           const std::atomic<uint64_t>& theirs = layout_.member(rank).arrived;
           if (theirs < meeting && processes_[rank]->has_ended() && theirs < meeting) {
             fail_without(rank, describe(last));
           }
         }
       });
}

void Communicator::fail_without(int rank, const std::string& call) {
  fail(ncclRemoteError, "rank " + std::to_string(rank_) + " waits in " + call + " for rank " +
                            std::to_string(rank) + " (process " +
                            std::to_string(processes_[rank]->id()) + "), which has died");
}

// The later of two ranks sees the earlier one's call, so no rank needs to wait for all.
void Communicator::compare(uint64_t meeting, const Call& call) {
  for (int rank = 0; rank < size_; ++rank) {
    const Member& member = layout_.member(rank);
    if (member.arrived != meeting) {
      continue;
    }
    const Call theirs = member.announced[meeting % 2];
    if (!is_alike(call, theirs)) {
      fail(ncclInvalidUsage, "rank " + std::to_string(rank_) + " calls " + describe(call) +
                                 ", but rank " + std::to_string(rank) + " calls " +
                                 describe(theirs));
    }
  }
}

// A rank that chooses for a split has read all choices for the previous one.
std::vector<Choice> Communicator::choose(const Choice& mine) {
  check();
  const uint64_t split = ++num_splits_;
  layout_.member(rank_).chosen[split % 2] = mine;
  layout_.member(rank_).splits = split;
  ring_all();
  std::vector<Choice> choices;
  for (int rank = 0; rank < size_; ++rank) {
    const Member& member = layout_.member(rank);
    wait([&] { return member.splits >= split; },
         [&] {
           if (processes_[rank]->has_ended() && member.splits < split) {
             fail_without(rank, "split");
           }
         });
    choices.push_back(member.chosen[split % 2]);
  }
  return choices;
}

}  // namespace standin
