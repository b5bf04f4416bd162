// What goes wrong, in words: a failure carries NCCL's code, and the process remembers the last one
// for ncclGetLastError.
#pragma once

#include <nccl.h>

#include <stdexcept>
#include <string>

namespace standin {

class Failure : public std::runtime_error {
 public:
  Failure(ncclResult_t code, const std::string& words) : std::runtime_error(words), code_(code) {}
  ncclResult_t code() const { return code_; }

 private:
  ncclResult_t code_;
};

// This rank has called ncclCommAbort. That is no failure: its collectives end without a word.
struct Aborted {};

void remember_words(const std::string& words);

// The words last remembered, which stay valid for this thread until it asks again.
const char* last_words();

// Writes words to stderr with the prefix of all messages, and remembers them.
void report(const std::string& words);

// The code of what `body` throws, whose words are remembered: NCCL's functions throw nothing.
template <typename Body>
ncclResult_t guarded(const Body& body) {
  try {
    body();
    return ncclSuccess;
  } catch (const Failure& failure) {
    remember_words(failure.what());
    return failure.code();
  } catch (const Aborted&) {
    remember_words("the communicator was aborted");
    return ncclInvalidUsage;
  } catch (const std::exception& error) {
    remember_words(error.what());
    return ncclInternalError;
  }
}

}  // namespace standin
