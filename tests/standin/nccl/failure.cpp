// The last error message of this process.
#include "failure.h"

#include <cstdio>
#include <mutex>

namespace standin {
namespace {

struct Words {
  std::mutex mutex;
  std::string last;
};

// Streams' threads outlive main(), so it is never destroyed.
Words& words_of_process() {
  static auto* const words = new Words;
  return *words;
}

}  // namespace

void remember_words(const std::string& words) {
  Words& all = words_of_process();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.last = "standin: NCCL: " + words;
}

const char* last_words() {
  static thread_local std::string copy;
  Words& all = words_of_process();
  const std::lock_guard<std::mutex> lock(all.mutex);
  copy = all.last;
  return copy.c_str();
}

void report(const std::string& words) {
  std::fprintf(stderr, "standin: NCCL: %s\n", words.c_str());
  remember_words(words);
}

}  // namespace standin
