import re
import subprocess
import sys

from paths import ROOT

EXAMPLES = ROOT / "examples"


def test_digits_trains_three_ways_and_compares_them(tmp_path):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    result = subprocess.run(
        [*launch, str(EXAMPLES / "digits.py")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "digits.png").stat().st_size > 10_000
    accuracy = {
        name: float(value)
        for name, value in re.findall(r"^(\(.\)).*?([\d.]+)%", result.stdout, re.MULTILINE)
    }
    assert accuracy.keys() == {"(a)", "(b)", "(c)"}
    assert accuracy["(b)"] > accuracy["(a)"]
