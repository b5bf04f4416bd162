// Sends and receives, any number of which make progress at once.
#pragma once

#include <vector>

#include "communicator.h"

namespace standin {

// A send or a receive; the call's rank is the peer. A send only reads.
struct Transfer {
  Call call;
  void* data;
};

// Returns once all are complete. Transfers of one kind with one peer run in order, others in any
// order. As with NCCL, a send is complete when its values are on their way.
void run_transfers(Communicator& communicator, const std::vector<Transfer>& transfers);

}  // namespace standin
