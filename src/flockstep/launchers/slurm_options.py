"""Checks the options of sbatch that a user may add to a submitted job: all options except those with which flockstep
could not follow the run.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from flockstep.errors import ConfigurationError

ONE = "a run is one job; leave it out"
AGAIN = "a job that Slurm starts again would find the record of its first attempt; leave it out"
AWAITS = "flockstep follows the job itself; leave it out"
OTHER = "the job's script is the flockstep command; leave it out"
REFUSED = {
    "array": ONE,
    "requeue": AGAIN,
    "wait": AWAITS,
    "wrap": OTHER,
    "test-only": "such a job is never started; leave it out",
    "clusters": "flockstep asks the Slurm of this host about the job; submit from a host of the other cluster",
}
"""Long option of sbatch → reason why a run cannot have the option.

`sbatch` accepts every prefix that no other option has.
"""
SHORT = {"a": "array", "W": "wait", "M": "clusters"}
"""Short option of sbatch → the equivalent long option."""
FLAGS = "HkOQsvhV"
"""Short options without a value, except the refused ones; several may be combined into one argument, as in `-HQ`."""
LONG_FLAGS = [
    "contiguous",
    "exclusive",
    "get-user-env",
    "hold",
    "ignore-pbs",
    "kill-on-invalid-dep",
    "nice",
    "no-kill",
    "no-requeue",
    "overcommit",
    "oversubscribe",
    "parsable",
    "propagate",
    "quiet",
    "reboot",
    "spread-job",
    "use-min-nodes",
    "verbose",
]
"""Long options whose value, if they have one, is in the same word."""
VARIABLES = {
    "SBATCH_ARRAY_INX": "array",
    "SBATCH_WAIT": "wait",
    "SBATCH_CLUSTERS": "clusters",
    "SLURM_CLUSTERS": "clusters",
}
"""Environment variable from which sbatch reads an option → name of the option."""


def options_of_job(options: str, environment: Mapping[str, str]) -> list[str]:
    """Return the words of `--slurm-options`, checked together with the environment that sbatch reads.

    Raises:
        ConfigurationError: the text cannot be split into words as in a shell, or one of the options is not allowed.
    """
    try:
        words = shlex.split(options)
    except ValueError as error:
        raise ConfigurationError(
            f"--slurm-options must be words as in a shell, got {options!r}: {error}; write it like "
            '"--partition=gpu --time=1:00:00"'
        ) from None
    for variable in VARIABLES.keys() & environment.keys():
        raise ConfigurationError(
            f"{variable} is set, from which sbatch reads --{VARIABLES[variable]}, but a submitted run cannot have it: "
            f"{REFUSED[VARIABLES[variable]].replace('leave it out', 'unset it')}"
        )
    value = False
    for word in words:
        if (name := _refused(word)) is not None:
            raise ConfigurationError(f"--slurm-options cannot have --{name}, got {word!r}: {REFUSED[name]}")
        if not word.startswith("-") and not value:
            raise ConfigurationError(f"--slurm-options must be options of sbatch, got {word!r}: {OTHER}")
        value = _expects_value(word)
    return words


def _refused(word: str) -> str | None:
    """The refused long option that a word stands for."""
    if word.startswith("--"):
        given = word[2:].partition("=")[0]
        return next((name for name in REFUSED if given and name.startswith(given)), None)
    if word.startswith("-"):
        for letter in word[1:]:
            if letter in SHORT:
                return SHORT[letter]
            if letter not in FLAGS:
                return None  # the rest of the word is this option's value
    return None


def _expects_value(word: str) -> bool:
    """Whether the value of this option is in the next word."""
    if word.startswith("--"):
        return "=" not in word and not any(flag.startswith(word[2:]) for flag in LONG_FLAGS)
    return word.startswith("-") and word[1:].lstrip(FLAGS) != "" and len(word[1:].lstrip(FLAGS)) == 1
