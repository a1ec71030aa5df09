"""Scripts in the style of the well-known examples learn on several workers, with a handful of changed lines.

Each script is a plain one apart from the lines that name flockstep or end the run; it prints a loss, which is lower
than it can be without learning.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from support.processes import RealRun

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds processes through /proc")

HERE = Path(__file__).parent
BOUNDS = {"classifier": 1.5, "gpt": 3.7, "lstm": 4.5, "vae": 38.0}
"""Script → loss that it reaches by learning. Without `optimizer.step()` it is about ln 10, 4.50, 5.27 and 44.9."""
CASES = [
    ("classifier", "all_reduce", 2),
    ("gpt", "all_reduce", 2),
    ("lstm", "local_sgd(period=4)", 2),
    ("vae", "ps(consistency=ssp(3))", 2),
]
OURS = re.compile(r"flockstep|optimizer\.finish\(\)|of_\w+\.finish\(\)")


@pytest.mark.parametrize(("name", "strategy", "workers"), CASES)
def test_a_script_learns(name: str, strategy: str, workers: int, tmp_path: Path) -> None:
    ended = RealRun(
        ["launch", "-n", str(workers), str(HERE / f"{name}.py"), strategy], tmp_path / "run", torch=True
    ).end(400)
    assert ended.code == 0, ended.err
    losses = [float(line) for line in ended.out.split()]
    assert len(losses) == workers
    assert max(losses) < BOUNDS[name]


@pytest.mark.parametrize("name", BOUNDS)
def test_few_lines_of_a_script_are_not_a_plain_script_s(name: str) -> None:
    """The import, `distribute` and `finish()` of each model, and one line for data or seeds and one for clipping."""
    text = (HERE / f"{name}.py").read_text().splitlines()
    changed = [line for line in text if OURS.search(line)]
    models = sum("flockstep.distribute" in line for line in changed)
    assert len(changed) <= 3 + 2 * models + (name == "vae")
