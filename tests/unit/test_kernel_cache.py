"""Compiled kernels on disk are used again only as long as no file has changed that they may be made of."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import flockstep

SOURCE = Path(flockstep.__file__).parent
PROGRAM = """
import numpy as np
from flockstep.arrays.kernels import on_numpy
print(on_numpy.pack(np.uint8([1, 1, 0]), 1).tolist())
"""


def packed(folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env={"PYTHONPATH": str(folder)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_change_in_one_file_reaches_kernels_of_all(tmp_path):
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(SOURCE, tmp_path / "flockstep", ignore=ignore)
    assert packed(tmp_path) == "[3]"
    compiled = sorted(tmp_path.rglob("*.nbi"))
    assert compiled, "nothing was kept"
    stamps = {path: path.stat().st_mtime_ns for path in compiled}
    assert packed(tmp_path) == "[3]"
    assert {path: path.stat().st_mtime_ns for path in compiled} == stamps, "it was compiled again for no reason"
    other = tmp_path / "flockstep" / "arrays" / "kernels" / "numpy_basics.py"
    other.write_text(other.read_text() + "\nCHANGED = True\n")
    assert packed(tmp_path) == "[3]"
    assert any(path.stat().st_mtime_ns != stamp for path, stamp in stamps.items()), "old code was used"
