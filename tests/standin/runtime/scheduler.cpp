// Runs the tasks of streams.
//
// When the process ends, threads of streams must not run work any more: the libraries that it needs
// are being destroyed. So an exit handler lets no further work begin, waits for what runs, and
// makes all waits return. The scheduler itself is never destroyed.
#include "scheduler.h"

#include <cstdlib>
#include <thread>
#include <utility>

#include "settings.h"
#include "streams.h"

namespace standin {
namespace {

// Work that takes longer than this at the end of the process waits for something that will not
// happen, such as another rank.
constexpr std::chrono::seconds kLongestExit(2);

}  // namespace

Scheduler& Scheduler::get() {
  static Scheduler* const value = new Scheduler;
  return *value;
}

void Scheduler::push(Lock& lock, const std::shared_ptr<Stream>& stream, Task task) {
  std::vector<Point> implicit = Streams::get().implicit_waits(*stream);
  task.waits.insert(task.waits.end(), implicit.begin(), implicit.end());
  const uint64_t position = ++stream->num_enqueued;
  if (settings().streams == StreamMode::kInline) {
    // Another host thread may be in the middle of the task before.
    wait(lock, {stream, position - 1});
    run(lock, stream, std::move(task));
    return;
  }
  task.enqueued = Clock::now();
  stream->tasks.push_back(std::move(task));
  if (!stream->has_thread) {
    start_thread(stream);
  }
  changed_.notify_all();
}

void Scheduler::wait(Lock& lock, const Point& point) {
  demand(point);
  changed_.wait(lock, [&] { return is_reached(point) || is_stopping_; });
}

void Scheduler::wait_for_all(Lock& lock, const std::shared_ptr<Stream>& stream) {
  wait(lock, {stream, stream->num_enqueued});
}

void Scheduler::demand(const Point& point) {
  if (point.stream->num_demanded < point.position) {
    point.stream->num_demanded = point.position;
    changed_.notify_all();
  }
}

void Scheduler::complete(Stream& stream, const Task& task) {
  if (task.mark != nullptr) {
    task.mark->time = Clock::now();
  }
  ++stream.num_completed;
  changed_.notify_all();
}

void Scheduler::run(Lock& lock, const std::shared_ptr<Stream>& stream, Task task) {
  for (const Point& point : task.waits) {
    wait(lock, point);
  }
  const bool runs_inline = settings().streams == StreamMode::kInline;
  if (!runs_inline) {
    stay_if_stopping(lock);
  }
  if (task.work != nullptr) {
    ++num_running_;
    lock.unlock();
    run_on_device(stream->device, *task.work);
    if (!runs_inline) {  // a host that waits for the stream finds the work dropped
      task.work.reset();
    }
    lock.lock();
    --num_running_;
  }
  complete(*stream, task);
  if (runs_inline) {  // a destructor may use the stream, which must be done with the task
    lock.unlock();
    task.work.reset();
    lock.lock();
  }
}

void Scheduler::stay_if_stopping(Lock& lock) {
  if (is_stopping_) {  // a thread that ended now would run destructors of thread-local objects
    changed_.wait(lock, [] { return false; });
  }
}

bool Scheduler::is_late(Lock& lock, const Stream& stream) {
  if (settings().streams != StreamMode::kLate || stream.num_completed < stream.num_demanded) {
    return false;
  }
  const auto due = stream.tasks.front().enqueued + settings().delay;
  if (Clock::now() >= due) {
    return false;
  }
  changed_.wait_until(lock, due);
  return true;
}

void Scheduler::serve(const std::shared_ptr<Stream>& stream) {
  Lock lock(mutex_);
  while (true) {
    changed_.wait(lock,
                  [&] { return !stream->tasks.empty() || stream->is_destroyed || is_stopping_; });
    stay_if_stopping(lock);
    if (stream->tasks.empty()) {
      Streams::get().forget(*stream);
      return;
    }
    if (is_late(lock, *stream)) {
      continue;
    }
    Task task = std::move(stream->tasks.front());
    stream->tasks.pop_front();
    run(lock, stream, std::move(task));
  }
}

void Scheduler::start_thread(const std::shared_ptr<Stream>& stream) {
  if (!has_exit_handler_) {
    has_exit_handler_ = true;
    std::atexit([] { get().stop(); });
  }
  stream->has_thread = true;
  std::thread([this, stream] { serve(stream); }).detach();
}

void Scheduler::stop() {
  Lock lock(mutex_);
  is_stopping_ = true;
  changed_.notify_all();
  changed_.wait_for(lock, kLongestExit, [&] { return num_running_ == 0; });
}

}  // namespace standin
