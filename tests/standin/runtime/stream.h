// A stream: a queue of tasks that run one after the other.
//
// Positions count the tasks of a stream from 1. A point of a stream is reached once as many tasks
// have been completed; events and streams that wait for each other wait for points.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "work.h"

namespace standin {

using Clock = std::chrono::steady_clock;

struct Capture;
struct Stream;

struct Point {
  std::shared_ptr<Stream> stream;
  uint64_t position;
};

// What cudaEventRecord() leaves in a stream.
struct Mark {
  Point point;
  Clock::time_point time;  // when the point was reached
  int num_queries = 0;
};

struct Task {
  WorkPointer work;            // or null
  std::shared_ptr<Mark> mark;  // gets its time after the work, or null
  std::vector<Point> waits;    // are reached before the work runs
  Clock::time_point enqueued;
};

// Guarded by the scheduler's lock.
struct Stream {
  int device = 0;
  unsigned flags = 0;
  int priority = 0;
  bool is_legacy = false;     // the device's default stream
  unsigned long long id = 0;  // unlike the handle, of no other stream of the process

  std::deque<Task> tasks;
  uint64_t num_enqueued = 0;
  uint64_t num_completed = 0;
  uint64_t num_demanded = 0;  // tasks that somebody waits for; others may be late
  bool has_thread = false;
  bool is_destroyed = false;

  std::shared_ptr<Capture> capture;  // to which its work goes, or null

  bool is_blocking() const { return !is_legacy && (flags & cudaStreamNonBlocking) == 0; }
  bool is_idle() const { return num_completed == num_enqueued; }
};

inline bool is_reached(const Point& point) { return point.stream->num_completed >= point.position; }

}  // namespace standin
