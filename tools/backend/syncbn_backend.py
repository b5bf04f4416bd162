"""A build backend that checks for the packages that a build needs, then calls setuptools'.

``pip install .`` installs them; ``pip install --no-build-isolation .`` does not check for them and
would end in a traceback.
"""

import re
import sys
from importlib.metadata import PackageNotFoundError, version

# setuptools for every supported torch: below 82 before 2.12, at least 77.0.3 from 2.15 on.
TOOLS = 'pip install torch ninja "setuptools>=77.0.3,<82"'


def numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)[:3]]


def check_python() -> None:
    if sys.version_info < (3, 10):  # noqa: UP036  # an older Python's pip runs this first
        found = ".".join(map(str, sys.version_info[:3]))
        raise SystemExit(
            f"syncbn needs Python 3.10 or later, but found Python {found}. Use a newer one: "
            "python3.12 -m venv FOLDER"
        )


def check_package(name: str, oldest: str) -> None:
    try:
        found = f"found {name} {version(name)}"
        if numbers(version(name)) >= numbers(oldest):
            return
    except PackageNotFoundError:
        found = "it is not installed"
    raise SystemExit(
        f"syncbn needs {name} {oldest} or later to be built, but {found}. Install first:\n"
        f"    {TOOLS}\n"
        "or leave out --no-build-isolation: pip then downloads all of it for the build, torch too"
    )


check_python()
check_package("setuptools", "77.0.3")
check_package("torch", "2.11")

from setuptools.build_meta import *  # noqa: F403
