// A message is its call and then its values. The receiver compares the call with its own.
#include "transfers.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <utility>

#include "ring.h"

namespace standin {
namespace {

// One direction to or from one peer.
class Lineup {
 public:
  Lineup(Communicator& communicator, Kind kind, int peer)
      : communicator_(communicator),
        is_send_(kind == Kind::kSend),
        peer_(peer),
        ring_(communicator.layout(), is_send_ ? communicator.rank() : peer,
              is_send_ ? peer : communicator.rank()) {}

  void add(const Transfer& transfer) { transfers_.push_back(transfer); }
  bool is_done() const { return transfers_.empty(); }
  bool can_advance() const { return (is_send_ ? ring_.num_writable() : ring_.num_readable()) > 0; }

  // Moves all bytes that can be moved now.
  void advance() {
    bool has_moved = false;
    while (!is_done() && can_advance()) {
      advance_first();
      has_moved = true;
    }
    if (has_moved) {
      communicator_.ring(peer_);
    }
  }

  // Fails if the first transfer can never continue.
  void diagnose() const {
    const int rank = communicator_.rank();
    const std::string words =
        "rank " + std::to_string(rank) + " waits in " + describe(transfers_.front().call);
    const bool has_died = communicator_.has_died(peer_);
    const bool is_ahead = communicator_.is_ahead(peer_);
    if (can_advance()) {  // since the last check
      return;
    }
    if (peer_ == rank) {
      communicator_.fail(ncclInvalidUsage,
                         words + ", itself, without a counterpart in the same group");
    }
    if (has_died) {
      communicator_.fail(ncclRemoteError,
                         words + ", but " + communicator_.describe_process(peer_) + " has died");
    }
    if (is_ahead) {
      communicator_.fail(ncclInvalidUsage, words + ", but rank " + std::to_string(peer_) +
                                               " calls " +
                                               describe(communicator_.announced_by(peer_)));
    }
  }

 private:
  void advance_first() {
    const Transfer& transfer = transfers_.front();
    if (position_ < sizeof(Call)) {
      if (is_send_ && position_ == 0) {
        header_ = transfer.call;
      }
      auto* const bytes = reinterpret_cast<unsigned char*>(&header_) + position_;
      position_ += move(bytes, sizeof(Call) - position_);
      if (position_ == sizeof(Call) && !is_send_) {
        compare(transfer.call);
      }
    } else {
      const size_t done = position_ - sizeof(Call);
      position_ +=
          move(static_cast<unsigned char*>(transfer.data) + done, bytes_of(transfer.call) - done);
    }
    if (position_ == sizeof(Call) + bytes_of(transfer.call)) {
      transfers_.pop_front();
      position_ = 0;
    }
  }

  size_t move(unsigned char* bytes, size_t length) {
    return is_send_ ? ring_.write(bytes, length) : ring_.read(bytes, length);
  }

  void compare(const Call& mine) const {
    if (header_.count != mine.count || header_.type != mine.type) {
      communicator_.fail(ncclInvalidUsage, "rank " + std::to_string(communicator_.rank()) +
                                               " calls " + describe(mine) + ", but rank " +
                                               std::to_string(peer_) + " calls " +
                                               describe(header_));
    }
  }

  Communicator& communicator_;
  bool is_send_;
  int peer_;
  Ring ring_;
  std::deque<Transfer> transfers_;
  Call header_{};
  size_t position_ = 0;  // in the first message
};

}  // namespace

void run_transfers(Communicator& communicator, const std::vector<Transfer>& transfers) {
  communicator.check();
  std::map<std::pair<Kind, int>, Lineup> lineups;
  for (const Transfer& transfer : transfers) {
    const auto key = std::make_pair(transfer.call.kind, transfer.call.rank);
    lineups.try_emplace(key, communicator, key.first, key.second).first->second.add(transfer);
  }
  const auto any = [&](auto&& predicate) {
    return std::any_of(lineups.begin(), lineups.end(),
                       [&](const auto& entry) { return predicate(entry.second); });
  };
  while (any([](const Lineup& lineup) { return !lineup.is_done(); })) {
    communicator.wait(
        [&] { return any([](const Lineup& l) { return !l.is_done() && l.can_advance(); }); },
        [&] {
          for (const auto& [key, lineup] : lineups) {
            if (!lineup.is_done()) {
              lineup.diagnose();
            }
          }
        });
    for (auto& [key, lineup] : lineups) {
      lineup.advance();
    }
  }
}

}  // namespace standin
