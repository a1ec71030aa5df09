"""Which options of sbatch a submitted run may have."""

from __future__ import annotations

import shlex

import pytest

from flockstep.errors import ConfigurationError
from flockstep.launchers.slurm_options import REFUSED, options_of_job


@pytest.mark.parametrize(
    "options",
    [
        "",
        "--partition=gpu --time 1:00:00",
        "-p gpu -t10",
        "--hold --job-name=theirs",
        "-HJ wait",
        "--comment 'a b'",
        "--wait-all-nodes=1 --reservation=array",
        "-C a100 --exclusive -d afterok:12",
        "-pWide -Q",
    ],
)
def test_options_of_one_job_pass_unchanged(options: str) -> None:
    assert options_of_job(options, {"SBATCH_PARTITION": "gpu"}) == shlex.split(options)


@pytest.mark.parametrize("name", REFUSED)
def test_what_breaks_a_run_is_refused_in_every_abbreviation(name: str) -> None:
    for end in range(1, len(name) + 1):
        for word in (f"--{name[:end]}", f"--{name[:end]}=1"):
            with pytest.raises(ConfigurationError, match=rf"--slurm-options cannot have --\S+, got '{word}': \w"):
                options_of_job(f"--partition=gpu {word}", {})


@pytest.mark.parametrize(
    ("word", "name"), [("-a1-3", "array"), ("-W", "wait"), ("-HW", "wait"), ("-M other", "clusters")]
)
def test_short_options_are_those_of_their_long_ones(word: str, name: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"cannot have --{name}, got "):
        options_of_job(word, {})


@pytest.mark.parametrize(
    "options", ["job.sh", "--hold job.sh", "-p gpu job.sh", "--time=1 job.sh", "-t10 job.sh", "-H :"]
)
def test_another_script_than_the_command_is_refused(options: str) -> None:
    with pytest.raises(
        ConfigurationError, match=r"must be options of sbatch, got .*: the job's script is the flockstep"
    ):
        options_of_job(options, {})


def test_variables_that_sbatch_reads_are_refused_too() -> None:
    with pytest.raises(ConfigurationError, match=r"SBATCH_WAIT is set, .* reads --wait, .*the job itself; unset it"):
        options_of_job("", {"SBATCH_WAIT": "1"})
