// Failures: exceptions with NCCL's code and a message. The process keeps the last message for
// ncclGetLastError.
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

// This rank has called ncclCommAbort. That is no failure: its collectives end silently.
struct Aborted {};

void remember_words(const std::string& words);

// The last message, which stays valid for this thread until its next call.
const char* last_words();

// Writes a message to stderr, with the prefix of all messages, and keeps it as the last one.
void report(const std::string& words);

// Returns the code of the exception that `body` throws, and keeps its message: NCCL's functions do
// not throw.
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
