// Each rank has two slots, for even and odd meetings. A rank that writes a slot for a meeting has
// been at the previous one, to which all ranks came after reading the slot's last content.
#include "exchange.h"

#include <algorithm>

namespace standin {

void exchange(Communicator& communicator, const Call& call, const Write& write, const Read& read) {
  const size_t bytes = bytes_of(call);
  const size_t most = communicator.layout().slot_bytes();
  size_t offset = 0;
  do {
    const size_t length = std::min(most, bytes - offset);
    const Slots slots(communicator.layout(), communicator.next_meeting());
    if (write && length > 0) {
      write(slots.of(communicator.rank()), offset, length);
    }
    communicator.meet(offset == 0 ? &call : nullptr);
    if (read && length > 0) {
      read(slots, offset, length);
    }
    offset += length;
  } while (offset < bytes);
}

}  // namespace standin
