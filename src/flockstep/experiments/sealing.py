"""Functions that seal jobs."""

from __future__ import annotations

from pathlib import Path

import msgspec

from flockstep.errors import ConfigurationError
from flockstep.experiments.options import takes
from flockstep.frameworks.base import Job
from flockstep.options import SealOptions
from flockstep.records.access import open_file
from flockstep.records.config import JOB_FILE
from flockstep.runtime.setup import digest, load_job
from flockstep.sealed import archive
from flockstep.sealed.job import sealed
from flockstep.sealed.returned import SENT, returned, written

NAMES = ".names"
"""Suffix of the file that keeps the names which a sealed job does not tell."""


@takes(SealOptions)
def seal(options: SealOptions) -> Path:
    """Write a job to a file from which others train it without its source, as `flockstep seal` does.

    In Python, the job may also be a `flockstep.Job`.

    Returns:
        The path of the file.

    Raises:
        ConfigurationError: PyTorch cannot export the job, or the exported job computes other gradients.
        MissingDependency: PyTorch is not installed.
    """
    return seal_job(options)


def seal_job(options: SealOptions) -> Path:
    """Write a job to a file, as the options say; return the path of the file."""
    path = Path(options.out)
    archive.require_new(path, options.overwrite)
    job = options.job if isinstance(options.job, Job) else load_job(str(options.job), options.seed)
    sign = None if options.sign is None else archive.KeyPair.read(options.sign)
    to = None if options.encrypt_to is None else archive.public_key(options.encrypt_to)
    sections, names = sealed(job, options)
    archive.write(path, sections, sign, to)
    if names:
        kept = {JOB_FILE: digest(path), **names}
        with open_file(path.with_name(path.name + NAMES), "wb", private=True) as file:
            file.write(msgspec.json.format(msgspec.json.encode(kept), indent=1))
    return path


def pack_run(
    run: Path | str,
    out: Path | str,
    *,
    sign: Path | str | None = None,
    encrypt_to: Path | str | None = None,
    overwrite: bool = False,
) -> list[str]:
    """Write what goes back of a run to a file, and return sentences on what it tells of the data."""
    archive.require_new(Path(out), overwrite)
    sections, told = returned(run)
    own = None if sign is None else archive.KeyPair.read(sign)
    archive.write(Path(out), sections, own, None if encrypt_to is None else archive.public_key(encrypt_to))
    return told


def unseal(
    run: Path | str,
    out: Path | str,
    *,
    names: Path | str | None = None,
    key: Path | str | None = None,
    trust: Path | str | None = None,
) -> Path:
    """Write the weights and the record of a run of a sealed job to a folder, as `flockstep unseal` does.

    The folder holds `model.safetensors` with the trained weights under their own names, and a record for `flockstep
    report`.

    Args:
        run: file that `flockstep return` wrote, or the folder of a run.
        out: folder to write; must not exist.
        names: file that `flockstep seal --rename` kept; None if the names were not replaced.
        key: private key to which the file is encrypted; None for a file that is not encrypted.
        trust: file with the public keys of which one must have signed the file; None for no such condition.

    Returns:
        The folder.

    Raises:
        ConfigurationError: the run left no result, or the file is damaged, or signed by nobody who is trusted.
    """
    if Path(run).is_dir():
        sections, _ = returned(run)
    else:
        sections = archive.read(run, SENT, archive.ANYONE if trust is None else str(trust), key)
    own: dict[str, str] = {}
    if names is not None:
        try:
            own = archive.decoded(Path(names).read_bytes(), dict[str, str], names)
        except OSError as error:
            raise ConfigurationError(f"cannot read the names in {names}: {error.strerror}; check the path") from None
    written(sections, own, Path(out))
    return Path(out)
