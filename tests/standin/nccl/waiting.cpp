// How a rank of a communicator waits, and what ends the wait: another rank, a failure, an abort.
#include <immintrin.h>

#include <chrono>
#include <cstring>

#include "communicator.h"

namespace standin {
namespace {

// Ranks that run at the same time meet within microseconds; asleep, they would take some 50.
constexpr auto kSpinTime = std::chrono::microseconds(20);
// Only a dead thread ends the wait without a ring.
constexpr auto kSleepTime = std::chrono::milliseconds(100);

enum FailureState : int32_t { kNone, kWriting, kWritten };

}  // namespace

void Communicator::wait(const std::function<bool()>& is_ready,
                        const std::function<void()>& diagnose) {
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + kSpinTime;
  do {
    for (int i = 0; i < 20; ++i) {
      if (is_ready()) {
        return;
      }
      _mm_pause();
    }
  } while (Clock::now() < end);
  Bell& bell = layout_.member(rank_).bell;
  auto next_diagnosis = Clock::now() + kSleepTime;
  while (true) {
    const uint32_t seen = bell.rings();
    if (is_ready()) {  // before the check: what has happened is not undone by a later failure
      return;
    }
    check();
    bell.sleep(seen, kSleepTime);
    if (Clock::now() >= next_diagnosis) {
      diagnose();
      next_diagnosis = Clock::now() + kSleepTime;
    }
  }
}

void Communicator::ring_all() {
  for (int rank = 0; rank < size_; ++rank) {
    if (rank != rank_) {
      ring(rank);
    }
  }
}

void Communicator::fail(ncclResult_t code, const std::string& words) {
  Header& header = layout_.header();
  int32_t state = kNone;
  if (header.failure.compare_exchange_strong(state, kWriting)) {
    header.code = code;
    std::strncpy(header.words, words.c_str(), sizeof(header.words) - 1);
    header.failure = kWritten;
    ring_all();
  }
  throw Failure(code, words);
}

void Communicator::check() const {
  if (is_aborted_) {
    throw Aborted();
  }
  const Header& header = layout_.header();
  if (header.failure == kWritten) {
    throw Failure(static_cast<ncclResult_t>(header.code), header.words);
  }
}

ncclResult_t Communicator::error() const {
  const Header& header = layout_.header();
  return header.failure == kWritten ? static_cast<ncclResult_t>(header.code) : ncclSuccess;
}

void Communicator::run_alone(const Call& call, const std::function<void()>& body) {
  const std::unique_lock<std::mutex> lock(running_, std::try_to_lock);
  check();
  if (!lock.owns_lock()) {
    const Call theirs = layout_.member(rank_).announced[num_meetings_ % 2];
    fail(ncclInvalidUsage, "rank " + std::to_string(rank_) + " runs " + describe(call) +
                               " while its " + describe(theirs) +
                               " still runs: two streams use one communicator at the same time");
  }
  body();
}

void Communicator::abort() {
  is_aborted_ = true;
  ring(rank_);
  const std::lock_guard<std::mutex> lock(running_);
}

}  // namespace standin
