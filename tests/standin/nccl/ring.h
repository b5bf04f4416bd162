// A channel's bytes, one process at each end.
#pragma once

#include <cstddef>

#include "layout.h"

namespace standin {

class Ring {
 public:
  Ring(const Layout& layout, int from, int to)
      : channel_(&layout.channel(from, to)),
        data_(layout.ring(from, to)),
        capacity_(layout.ring_bytes()) {}

  size_t num_readable() const { return channel_->written - channel_->read; }
  size_t num_writable() const { return capacity_ - num_readable(); }

  // Writes as many bytes as there is room for, and returns their number.
  size_t write(const void* from, size_t bytes);
  size_t read(void* to, size_t bytes);

 private:
  Channel* channel_;
  unsigned char* data_;
  size_t capacity_;
};

}  // namespace standin
