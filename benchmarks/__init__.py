"""Speed, accuracy and messages, measured: ``python -m benchmarks`` from the project's root."""

import sys
from pathlib import Path

# ``python -m`` and ``python -c`` look into the current folder before all others. In the project's,
# syncbn/ is the sources, without a binary or with an old one, which would hide the installed
# package. At the end it is found where none is installed; PYTHONPATH=. puts it before one.
_ROOT = Path(__file__).resolve().parents[1]
if sys.argv[0] in ("-m", "-c") and Path(sys.path[0]).resolve() == _ROOT:
    del sys.path[0]
    sys.path.append(str(_ROOT))
