"""Groups not made by torch.distributed.new_group, and a record of the messages of a rank."""

import contextlib
from unittest import mock

import torch
import torch.distributed as dist


@contextlib.contextmanager
def messages_sent():
    """Collect the tensors that this rank sends in sums, those of aborted passes included."""
    messages = []

    def recorded(send):
        return lambda message, *others, **named: (
            messages.append(message),
            send(message, *others, **named),
        )[1]

    with mock.patch.object(dist, "all_reduce", recorded(dist.all_reduce)):
        yield messages


def make_by_hand(path, rank, world_size):
    """Return a group over gloo, as programs make it that never call init_process_group."""
    store = dist.FileStore(path, world_size)
    group = dist.ProcessGroup(dist.PrefixStore("group", store), rank, world_size)
    backend = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, world_size)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return group


class Exchangeable(dist.ProcessGroup):
    """Passes its work on to a group that may be replaced between steps, as torchft does."""

    def __init__(self, inner):
        super().__init__(inner.rank(), inner.size())
        self.inner = inner

    def rank(self):
        return self.inner.rank()

    def size(self):
        return self.inner.size()

    def allreduce(self, tensors, options=None):
        return self.inner.allreduce(tensors, options or dist.AllreduceOptions())

    def getBackendName(self):
        return "exchangeable"
