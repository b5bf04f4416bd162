"""The operators of one rank: calls, arguments, fallbacks. This room knows nothing of ranks."""

from syncbn.ops.batch_norm import *  # noqa: F403
