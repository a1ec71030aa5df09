"""Scripts in the style of the well-known examples learn on several workers, with a handful of changed lines.

Each script is a plain one apart from the lines that name flockstep or end the run; it prints a loss, which is lower
than it can be without learning.
"""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from support.matrix import few
from support.processes import RealRun

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds processes through /proc")

HERE = Path(__file__).parent
BOUNDS = {
    "classifier": 1.5,
    "gpt": 3.7,
    "lstm": 4.5,
    "vae": 38.0,
    "gan": 0.25,
    "siamese": 0.8,
    "reinforce": 0.3,
    "embeddings": 8.0,
}
"""Script → loss that it does not reach without learning, and reaches with it."""
STRATEGIES = ["all_reduce", "ps(consistency=ssp(3))", "local_sgd(period=4)", "gossip", "easgd(period=4)"]
QUICK = [("gan", "all_reduce", 2)]
"""Two models that step in turn; what else the scripts do, tests/end_to_end/test_torch_*.py do at every push."""
OURS = re.compile(r"flockstep|optimizer\.finish\(\)|of_\w+\.finish\(\)")


@pytest.mark.parametrize(("name", "strategy", "workers"), few(product(BOUNDS, STRATEGIES, (2, 4)), *QUICK))
def test_a_script_learns(name: str, strategy: str, workers: int, tmp_path: Path) -> None:
    ended = RealRun(
        ["launch", "-n", str(workers), str(HERE / f"{name}.py"), strategy], tmp_path / "run", torch=True
    ).end(400)
    assert ended.code == 0, ended.err
    losses = [float(line) for line in ended.out.split()]
    assert len(losses) == workers
    assert max(losses) < BOUNDS[name], losses


@pytest.mark.full
@pytest.mark.parametrize("name", BOUNDS)
def test_without_its_steps_a_script_does_not_reach_the_bound(name: str, tmp_path: Path) -> None:
    lines = (HERE / f"{name}.py").read_text().splitlines()
    script = tmp_path / "script.py"
    script.write_text("\n".join(line for line in lines if not re.fullmatch(r" +(optimizer|of_\w+)\.step\(\)", line)))
    command = [sys.executable, str(script), "all_reduce"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert float(done.stdout) > BOUNDS[name]


@pytest.mark.parametrize("name", BOUNDS)
def test_few_lines_of_a_script_are_not_a_plain_script_s(name: str) -> None:
    """The import, `distribute` and `finish()` of each model, and one line for data or seeds and one for clipping."""
    text = (HERE / f"{name}.py").read_text().splitlines()
    changed = [line for line in text if OURS.search(line)]
    models = sum("flockstep.distribute" in line for line in changed)
    assert len(changed) <= 3 + 2 * models + (name in ("vae", "gan", "embeddings"))
