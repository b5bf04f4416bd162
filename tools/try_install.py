"""Tries the README's installation before a release: ``python -m tools.try_install [PYTHON ...]``.

For each Python, by default each python3.x on PATH, it clones the repository, runs the first block
of the README as printed, then ``python -m syncbn info`` and the README's program. If uv is on PATH,
it tries the first Python with uv's commands too. It prints a line for each way, and the last lines
of one that failed; the exit status is then 1. Each way downloads torch.
"""

import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]


def blocks(language: str) -> list[str]:
    """Return the README's blocks of code in a language."""
    pattern = rf"^```{language}\n(.*?)^```$"
    return re.findall(pattern, (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)


def pythons() -> list[str]:
    """Return the path of each python3.x on PATH that starts."""
    found = filter(None, (shutil.which(f"python3.{minor}") for minor in range(10, 30)))
    return [path for path in found if subprocess.run([path, "-c", ""]).returncode == 0]


def script(python: str, with_uv: bool) -> str:
    """Return the README's commands with this Python."""
    commands = blocks("bash")[0]
    if with_uv:
        commands = commands.replace("python3 -m venv", f"uv venv --python {python}")
        commands = commands.replace("pip install", "uv pip install")
    else:
        commands = commands.replace("python3", python, 1)
    # Outside of the clone, where Python would import the folder syncbn.
    return f"{commands}python -m syncbn info\ncd ..\npython train.py\n"


def attempt(python: str, with_uv: bool) -> bool:
    """Try one way; return whether it worked."""
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "syncbn"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        (Path(folder) / "train.py").write_text(blocks("python")[0])
        begin = time.monotonic()
        result = subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", script(python, with_uv)],
            cwd=clone,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        seconds = time.monotonic() - begin
    works = result.returncode == 0 and "SyncBatchNorm2d: tensor(" in result.stdout
    way = f"{python} with uv" if with_uv else python
    print(f"{way}: {'works' if works else 'FAILED'}, {seconds:.0f} s", flush=True)
    if not works:
        print("\n".join(result.stdout.splitlines()[-20:]), flush=True)
    return works


def main() -> None:
    """Try each way."""
    tried = sys.argv[1:] or pythons()
    ways = [(python, False) for python in tried]
    if shutil.which("uv"):
        ways.append((tried[0], True))
    if not all([attempt(*way) for way in ways]):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
