"""Measures speed, accuracy and messages: ``python -m benchmarks`` from the project's root."""

import sys
from pathlib import Path

# ``python -m`` and ``python -c`` search the current folder first. In the project's root, the
# sources in syncbn/, with an old binary or none, would hide the installed package. At the end of
# the path they are found only if no package is installed; PYTHONPATH=. puts them first.
ROOT = Path(__file__).resolve().parents[1]
if sys.argv[0] in ("-m", "-c") and Path(sys.path[0]).resolve() == ROOT:
    del sys.path[0]
    sys.path.append(str(ROOT))
