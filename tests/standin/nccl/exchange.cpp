// Each rank has two slots, for even and odd meetings. A rank that writes a slot for a meeting has
// been at the previous one, to which all ranks came after reading the slot's last content.
#include "exchange.h"

#include <algorithm>

namespace standin {

size_t part_bytes(const Communicator& communicator, size_t parts) {
  return communicator.layout().slot_bytes() / parts / kCacheLine * kCacheLine;
}

void exchange(Communicator& communicator, const Call& call, size_t bytes, size_t parts,
              const Exchange& exchange) {
  const size_t most = part_bytes(communicator, parts);
  size_t offset = 0;
  do {
    const size_t length = std::min(most, bytes - offset);
    const Slots slots(communicator.layout(), communicator.next_meeting(kDeviceLane));
    if (exchange.write && length > 0) {
      exchange.write(slots.of(communicator.rank()), offset, length);
    }
    communicator.meet(kDeviceLane, offset == 0 ? &call : nullptr);
    if (exchange.read && length > 0) {
      exchange.read(slots, offset, length);
    }
    offset += length;
  } while (offset < bytes);
}

}  // namespace standin
