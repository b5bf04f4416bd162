"""What a fault of one rank is: the step that differs, and what becomes of each rank."""

from collections.abc import Callable
from dataclasses import dataclass, field

from support.trial import CHANNELS, Training


@dataclass(frozen=True)
class Fate:
    """What a rank gets: a pattern of its error's class and words, and words for the document.

    ``{where}`` in the pattern is forward, backward or recomputation, ``{pass}`` the same as a noun.
    """

    pattern: str
    words: str
    own: bool = False  # not of the library: without its layer and rank
    over_nccl: "Fate | None" = None  # on CUDA, where it is another

    @property
    def late(self) -> "Fate":
        """What the rank gets on CUDA over NCCL."""
        return self.over_nccl or self


CHANNELS_DIFFER = r"ValueError: expected the same channels on all ranks"
ABORTED = r"RuntimeError: another rank of the process group aborted this {pass}"
PASSES_DIFFER = r"RuntimeError: the ranks run different passes: this rank runs .*rank \d"

# On CUDA over NCCL.
late_abort = Fate(
    r"RuntimeError: the .* gave NaN: another rank of the process group aborted it because of an "
    r"error; rank \d: OutOfMemoryError: CUDA out of memory",
    "in a later pass: “… gave NaN: another rank … aborted it”, quoting its error",
)
late_difference = Fate(
    rf"RuntimeError: the .* gave NaN: another rank made another pass in its place|{CHANNELS_DIFFER}"
    "|RuntimeError: the ranks run different passes: this rank runs",
    "in a later pass: “… gave NaN: another rank made another pass”; a rank whose sizes differ "
    "raises at once",
)
device_waits = Fate("TimeoutError: the device waits", "nothing; its device waits")
late_loss = Fate(
    r"TimeoutError: the device waits|RuntimeError: the .* gave NaN|RuntimeError: the .* all-reduce "
    r"of a SyncBatchNorm layer failed",
    "nothing; its device waits, or “… gave NaN” in a later pass if NCCL notices the loss",
)

goes_on = Fate("", "continues")
aborted = Fate(
    rf"{ABORTED}.*rank \d: OutOfMemoryError: CUDA out of memory",
    "at once: “another rank of the process group aborted”, quoting its error",
    over_nccl=late_abort,
)
disagreement = Fate(
    PASSES_DIFFER,
    "at once: “the ranks run different passes”, naming both",
    over_nccl=late_difference,
)
other_channels = Fate(
    f"{CHANNELS_DIFFER}|{ABORTED}",
    "at once: “expected the same channels on all ranks”, with both numbers",
    over_nccl=late_difference,
)
# Two layers of other sizes: which of both is found first is the library's choice.
disagreement_or_channels = Fate(
    f"{PASSES_DIFFER}|{CHANNELS_DIFFER}|{ABORTED}",
    "at once: “the ranks run different passes” or “expected the same channels”",
    over_nccl=late_difference,
)
communication = Fate(
    r"RuntimeError: the {where} all-reduce of a SyncBatchNorm layer failed: another rank has "
    r"failed, left, did not come in time or runs another layer",
    "at the group's timeout: “the all-reduce of a SyncBatchNorm layer failed”",
    over_nccl=device_waits,
)
loss_of_connection = Fate(
    communication.pattern,
    "at once: “the all-reduce of a SyncBatchNorm layer failed”",
    over_nccl=late_loss,
)
user_error = Fate(r"ValueError: the words of a user's layer$", "its own error", own=True)
out_of_memory = Fate(
    r"OutOfMemoryError: CUDA out of memory\. syncbn tried to allocate", "its own error"
)
interrupt = Fate(
    r"KeyboardInterrupt: $",
    "KeyboardInterrupt, once the collective ends",
    own=True,
    over_nccl=Fate(r"KeyboardInterrupt: $", "KeyboardInterrupt, at once", own=True),
)
gone = Fate("", "is gone")

EAGER = ((2, "eager"), (3, "eager"))
COMPILED = ((2, "compiled"),)
CHECKPOINTED = ((3, "checkpointed"),)
EVERYWHERE = EAGER + COMPILED + CHECKPOINTED
SELDOM = ((3, "eager"), *COMPILED)  # of what waits for seconds
ONCE = ((3, "eager"),)  # the same code finds another fault, which is tested everywhere

WAITING_SECONDS = 5  # of a group's timeout

# Over NCCL: the ends of a process that are tested, and the faults tested with three ranks as well.
STARTS_AGAIN = ("memory-before-exits", "exit-code-0", "SIGKILL")
WITH_THREE = ("channels", "order", "memory-before")


def train(training: Training, where: str) -> None:
    training.step()


@dataclass(frozen=True)
class Fault:
    """``differs`` and ``others_do`` are the step of the rank that differs and of the others."""

    name: str
    what: str
    differs: Callable[[Training, str], None]
    that_rank: Fate
    others: Fate
    advice: str
    where: tuple[str, ...] = ("forward",)
    ways: tuple[tuple[int, str], ...] = EVERYWHERE  # ranks and mode
    others_do: Callable[[Training, str], None] = train
    prepare: Callable[[Training], None] = lambda training: None
    channels: tuple[int, ...] = CHANNELS
    waits: bool = False  # for the group's timeout: nobody can know before
    leaves: bool = False  # is no member of the group that is made afterwards
    ends: str = ""  # how its process does
    resume: Callable[..., None] | None = None
    stops: bool = False  # over NCCL: makes no further step, if it has not raised
    # By ``where``: what the others run and what that rank runs, which errors say in eager mode.
    passes: dict[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def timeout(self) -> int:
        """Seconds, of the group."""
        return WAITING_SECONDS if self.waits else 60  # by far more than compilers take

    @property
    def runs_over_nccl(self) -> bool:
        """Whether it is tested on CUDA: not compiled, and not where a process is to be resumed."""
        return self.ways != COMPILED and self.resume is None

    def cases_over_nccl(self) -> list[tuple[str, int, str]]:
        """Return where, number of ranks and mode of each case on CUDA."""
        if not self.runs_over_nccl or (self.ends and self.name not in STARTS_AGAIN):
            return []
        places = [where for where in self.where if where in ("forward", "backward")]
        if self.ends:  # all ranks start again, which takes seconds
            places = places[:1]
        sizes = (2, 3) if self.name in WITH_THREE else (2,)
        return [(where, size, "eager") for size in sizes for where in places]

    def cases(self) -> list[tuple[str, int, str]]:
        """Return where, number of ranks and mode of each case."""
        return [
            (where, world_size, mode)
            for where in self.where
            for world_size, mode in (CHECKPOINTED if where == "recomputation" else self.ways)
        ]
