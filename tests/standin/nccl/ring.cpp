// A ring's end is followed by its beginning.
#include "ring.h"

#include <algorithm>
#include <cstring>

namespace standin {

size_t Ring::write(const void* from, size_t bytes) {
  const uint64_t begin = channel_->written;
  const size_t length = std::min(bytes, num_writable());
  const size_t at = begin % capacity_;
  const size_t before_end = std::min(length, capacity_ - at);
  std::memcpy(data_ + at, from, before_end);
  std::memcpy(data_, static_cast<const unsigned char*>(from) + before_end, length - before_end);
  channel_->written = begin + length;
  return length;
}

size_t Ring::read(void* to, size_t bytes) {
  const uint64_t begin = channel_->read;
  const size_t length = std::min(bytes, num_readable());
  const size_t at = begin % capacity_;
  const size_t before_end = std::min(length, capacity_ - at);
  std::memcpy(to, data_ + at, before_end);
  std::memcpy(static_cast<unsigned char*>(to) + before_end, data_, length - before_end);
  channel_->read = begin + length;
  return length;
}

}  // namespace standin
