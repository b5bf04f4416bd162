// The processes of the other ranks, to notice that one has died.
#pragma once

#include <sys/types.h>

namespace standin {

// A process, by a descriptor: its number may be reused.
class Process {
 public:
  explicit Process(pid_t id);
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;
  ~Process();

  pid_t id() const { return id_; }
  // True also before its parent has collected its exit status.
  bool has_ended() const;

 private:
  pid_t id_;
  int descriptor_;
};

}  // namespace standin
