// The log of the host's calls: launches, copies, waits and allocations, a line each. Tests count
// them where a GPU would need a profiler.
// Taking the log empties it. It may never be taken, so only the newest lines are kept.
#include <deque>
#include <mutex>
#include <string>

#include "standin.h"

namespace standin {
namespace {

constexpr size_t kMostLines = 100000;

class Log {
 public:
  static Log& get() {
    static Log* const value = new Log;
    return *value;
  }

  void add(std::string line) {
    const std::lock_guard<std::mutex> lock(mutex_);
    lines_.push_back(std::move(line));
    if (lines_.size() > kMostLines) {
      lines_.pop_front();
    }
  }

  std::string take() {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::string text;
    for (const std::string& line : lines_) {
      text += line;
      text += '\n';
    }
    lines_.clear();
    return text;
  }

 private:
  std::mutex mutex_;
  std::deque<std::string> lines_;
};

}  // namespace
}  // namespace standin

STANDIN_API void standin_log(const char* kind, const char* name) {
  standin::Log::get().add(std::string(kind) + " " + name);
}

STANDIN_API const char* standin_take_log() {
  // It stays readable until this thread's next call.
  thread_local std::string taken;
  taken = standin::Log::get().take();
  return taken.c_str();
}
