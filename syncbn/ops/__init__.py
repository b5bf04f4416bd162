"""The operators of one rank: calls, arguments, fallbacks. This room knows nothing of ranks."""

# First: its errors tell why syncbn cannot run here.
from syncbn.ops import _extension as _extension  # isort: skip
from syncbn.ops.batch_norm import *  # noqa: F403
