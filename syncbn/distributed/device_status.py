"""What a rank asks a CUDA device, for which its host does not wait."""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from syncbn import _compat

# Between two questions to a device whether it has come to a launch.
_STALL_SECONDS = 1.0


class DeviceStatus:
    """The status of passes on a CUDA device: operators write it there, and the host reads it."""

    def __init__(self, device: torch.device, wait_seconds: float | None) -> None:
        self._device, pins = device, device.type == "cuda"
        # How long to wait before reading; None to read without waiting.
        self._wait_seconds = wait_seconds if pins else None
        self._stream: torch.cuda.Stream | None = None
        # 0, or the sum of the fingerprints of a pass; negative if a rank has aborted it.
        with _compat.without_dispatch_modes(), torch.inference_mode(False):
            self.note = torch.zeros(1, dtype=torch.float64, device="cpu", pin_memory=pins)
        self._zero: Tensor | None = None
        # Recorded when the device has cleared the note; None before the first time.
        self._cleared: torch.cuda.Event | None = None
        # Recorded when the device was last asked, and the time of the next question.
        self._launched: torch.cuda.Event | None = None
        self._asks_at = 0.0

    def read(self) -> float:
        """Return the note; 0 until the device has cleared an old one.

        Over gloo the host waits for each sum. Then it waits here for the operator that verifies the
        last sum, so that all ranks read the note at the same pass.
        """
        if self._wait_seconds is not None and self._stream is not None:
            has_come(self._stream, self._wait_seconds)
        if self._cleared is not None:
            if torch.cuda.is_current_stream_capturing() or not self._cleared.query():
                return 0.0
            self._cleared = None
        return self.note.item()

    def note_pass(self) -> None:
        """Note the stream of a pass before its last operator."""
        if self._wait_seconds is not None:
            self._stream = torch.cuda.current_stream(self._device)
        if self._zero is None and self._device.type == "cuda":
            self._make_zero()

    def _make_zero(self) -> None:
        """Keep a zero for :meth:`clear`, for which a full device has no memory.

        A CUDA graph's memory must not be kept.
        """
        if not torch.cuda.is_current_stream_capturing():
            zero = self._new_zero()
            self._zero = None if _compat.is_in_cuda_graph(zero) else zero

    def _new_zero(self) -> Tensor:
        with _compat.without_dispatch_modes(), torch.inference_mode(False):
            return torch.zeros_like(self.note, device=self._device)

    def clear(self) -> None:
        """Clear the note, and the notes of passes that are queued on the device."""
        if self._device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            self.note.zero_()
            return
        zero = self._new_zero() if self._zero is None else self._zero
        self.note.copy_(zero, non_blocking=True)
        self._cleared = torch.cuda.current_stream(self._device).record_event()

    def has_stalled(self) -> bool:
        """Whether the device has not come to a launch of a second ago; True once a second."""
        now = time.monotonic()
        if now < self._asks_at or self._device.type != "cuda":
            return False
        if torch.cuda.is_current_stream_capturing():
            return False
        self._asks_at = now + _STALL_SECONDS
        if self._launched is not None and not self._launched.query():
            return True
        self._launched = torch.cuda.current_stream(self._device).record_event()
        return False


class DeviceStatuses:
    """The statuses of a group's passes on the CUDA devices of this process."""

    def __init__(self, wait_seconds: float | None) -> None:
        self._wait_seconds = wait_seconds
        self.by_device: dict[torch.device, DeviceStatus] = {}

    def of(self, device: torch.device) -> DeviceStatus:
        """Return the status for a pass on this device."""
        status = self.by_device.get(device)
        if status is None:
            status = self.by_device[device] = DeviceStatus(device, self._wait_seconds)
        status.note_pass()
        return status

    def read(self) -> float:
        """Return the note of a failure that has not been raised; 0 without one."""
        for status in self.by_device.values():
            found = status.read()
            if found != 0:
                return found
        return 0.0

    def have_stalled(self) -> bool:
        """Whether a device stands still, see :meth:`DeviceStatus.has_stalled`."""
        return any(status.has_stalled() for status in self.by_device.values())

    def clear(self) -> None:
        """Clear the notes of all devices."""
        for status in self.by_device.values():
            status.clear()


def has_failed(device: torch.device) -> bool:
    """Whether a CUDA device reports an error in each call, as after an access to no memory."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.current_stream(device).query()
    except RuntimeError:
        return not torch.cuda.is_current_stream_capturing()
    return False


def has_come(
    stream: torch.cuda.Stream, seconds: float, gives_up: Callable[[], bool] = lambda: False
) -> bool:
    """Wait until a CUDA device has done all that was launched on a stream.

    ``synchronize()`` has no bound, and a rank that has failed may have left out a collective.

    Returns:
        False after ``seconds``, once ``gives_up()`` is true, or while a graph is captured.
    """
    if torch.cuda.is_current_stream_capturing():
        return False
    event = stream.record_event()
    deadline = time.monotonic() + seconds
    while not event.query():
        if gives_up() or time.monotonic() > deadline:
            return False
        time.sleep(0.0002)
    return True
