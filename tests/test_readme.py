"""The commands of README.md: every block is run, the short ones by the suite, the long ones by

    pytest tests/test_readme.py --readme --timeout=3600

in the order of the README, in a copy of the repository. That takes ten to fifteen minutes on two cores and needs a
package index. `-k quickstart` runs one of them.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
BLOCK = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
BLOCKS = BLOCK.findall(README)
# Words of a block, and how it is tested: no block is without a test. "ci": the tests themselves, which .ci/run calls.
HOW = {
    "./scripts/quickstart.sh": "long",
    "./scripts/test.sh": "ci",
    "--config=configs/quickstart.py": "long",
    "--config=configs/swarm.py": "terminal",
    "train.py --peer=3": "second terminal",
    "--config=configs/pool.py": "terminal",
    "train.py --peer=4": "second terminal",
    "--emit=runs/two": "long",
    "planner solve": "long",
    "scripts/simulate.py": "short",
}
SIZE = {
    "--pipelines=50 --microbatches=400": "--pipelines=5 --microbatches=40"
}  # words of a block: those tested instead
STEPS_FIRST, FIRST_S = 3, 300.0
NEWCOMER = re.compile(r"^(python scripts/train\.py --join=(?:.*\\\n)*.*?)( &)?$", re.MULTILINE)


def words_of(block: str) -> list[str]:
    return [words for words in HOW if words in block]


def blocks(*hows: str) -> list:
    """The blocks that are tested in one of these ways, in order."""
    found = [(words_of(block), block) for block in BLOCKS]
    return [pytest.param(block, id=words[0]) for words, block in found if words and HOW[words[0]] in hows]


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """A copy of the files of the repository, to run in."""
    folder = tmp_path_factory.mktemp("readme")
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    for name in filter(lambda name: (ROOT / name).is_file(), names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    return folder


def start(copy: Path, block: str, log: Path) -> subprocess.Popen:
    """Start a block as a script of bash: `pkill -f` finds what stands on a command line. Its folders have names of this
    test, so that it finds no other's processes."""
    script = log.with_suffix(".sh")
    script.write_text("set -euo pipefail\n" + block.replace("runs/", f"runs/{copy.name}_{os.getpid()}_"))
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(copy)}
    with log.open("w") as file:
        return subprocess.Popen(
            ["bash", str(script)], cwd=copy, env=environment, stdout=file, stderr=file, start_new_session=True
        )


@contextlib.contextmanager
def running(copy: Path, block: str, log: Path) -> Iterator[subprocess.Popen]:
    """A block that is started; none of its processes outlives the test."""
    process = start(copy, block, log)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run(copy: Path, block: str, log: Path) -> str:
    with running(copy, block, log) as process:
        assert process.wait() == 0, log.read_text()
    text = log.read_text()
    assert "Traceback" not in text, text
    return text


def test_every_block_is_tested_in_one_way():
    ways = {block: words_of(block) for block in BLOCKS}
    wrong = [(block, words) for block, words in ways.items() if len(words) != 1]
    assert not wrong, "say in HOW how these blocks are tested"
    assert {words[0] for words in ways.values()} == set(HOW), "HOW has words that no block has"


def test_the_block_that_runs_the_tests_is_what_the_checks_of_a_commit_run():
    assert [block.strip() for block in BLOCKS if HOW[words_of(block)[0]] == "ci"] == ["./scripts/test.sh"]
    assert "./scripts/test.sh" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize("block", blocks("short"))
def test_a_short_block_runs(block, copy, tmp_path):
    """With a tenth of its size."""
    for words, smaller in SIZE.items():
        assert words in block
        block = block.replace(words, smaller)
    assert run(copy, block, tmp_path / "log").strip()


@pytest.mark.slow
@pytest.mark.parametrize("block", blocks("long"))
def test_a_long_block_runs(block, copy, tmp_path, request):
    if not request.config.getoption("--readme"):
        pytest.skip("long: pytest tests/test_readme.py --readme --timeout=3600")
    assert run(copy, block, tmp_path / "log").strip()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(first.values[0], second.values[0], id=first.id)
        for first, second in zip(blocks("terminal"), blocks("second terminal"), strict=True)
    ],
)
def test_an_example_in_two_terminals_runs(first, second, copy, tmp_path, request):
    """The second block begins when the first prints steps. Its newcomer stays to the end, in the background."""
    if not request.config.getoption("--readme"):
        pytest.skip("long: pytest tests/test_readme.py --readme --timeout=3600")
    assert NEWCOMER.search(second)
    log = tmp_path / "first"
    with running(copy, first, log) as process:
        deadline_s = time.monotonic() + FIRST_S
        while log.read_text().count("\nstep ") < STEPS_FIRST:
            assert process.poll() is None and time.monotonic() < deadline_s, log.read_text()
            time.sleep(0.2)
        with running(copy, NEWCOMER.sub(r"\1 &", second), tmp_path / "second") as other:
            assert other.wait() == 0, (tmp_path / "second").read_text()
            assert "Traceback" not in (tmp_path / "second").read_text()
            assert process.wait() == 0, log.read_text()
    assert "done: " in log.read_text()
