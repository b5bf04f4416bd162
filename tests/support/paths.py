"""The project's folder, from which tests import ``benchmarks`` and ``tools``."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

# Last, so that tests import the installed package, not the folder of its sources.
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))
