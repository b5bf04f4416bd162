// Runs the tasks of streams: at once, in a thread for each stream, or late (settings.h).
//
// One lock guards all streams, events, captures and graphs. Work runs without the lock and is
// dropped without it: what a destructor does is not known here.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>

#include "stream.h"

namespace standin {

using Lock = std::unique_lock<std::mutex>;

class Scheduler {
 public:
  static Scheduler& get();

  Lock lock() { return Lock(mutex_); }

  // Enqueues a task, behind what the stream waits for by itself (Streams::implicit_waits()). A task
  // that runs at once runs before this returns. The lock is free in the meantime.
  void push(Lock& lock, const std::shared_ptr<Stream>& stream, Task task);

  // Waits until the point is reached; in late mode this makes its tasks run.
  void wait(Lock& lock, const Point& point);

  // Waits for all tasks of a stream.
  void wait_for_all(Lock& lock, const std::shared_ptr<Stream>& stream);

  // In late mode, lets all tasks up to the point run.
  void demand(const Point& point);

  // Lets a destroyed stream's thread end.
  void wake() { changed_.notify_all(); }

  // Whether the process ends. To be asked with the lock.
  bool is_stopping() const { return is_stopping_; }

 private:
  void run(Lock& lock, const std::shared_ptr<Stream>& stream, Task task);
  void complete(Stream& stream, const Task& task);
  void stay_if_stopping(Lock& lock);
  bool is_late(Lock& lock, const Stream& stream);
  void serve(const std::shared_ptr<Stream>& stream);
  void start_thread(const std::shared_ptr<Stream>& stream);
  void stop();

  std::mutex mutex_;
  std::condition_variable changed_;  // any stream's numbers, or is_stopping_
  int num_running_ = 0;              // threads that run or drop work
  bool has_exit_handler_ = false;
  bool is_stopping_ = false;  // the process ends: no work begins any more
};

}  // namespace standin
