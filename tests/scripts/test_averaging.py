"""No survivor of a kill -9 in the middle of an averaging round holds a mixed vector."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_what_survivors_hold_is_one_of_the_two_right_sums():
    command = [
        sys.executable,
        str(ROOT / "scripts/bench/averaging.py"),
        "kill",
        "--tries=3",
        "--n_elements=1000000",
        "--seed=1",
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=200)
    assert done.returncode == 0, done.stdout
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["bad"] == {} and result["whole"] + result["redone"] == 3
