"""The commands for jobs that travel without their source."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from flockstep.cli import options as o
from flockstep.options import Arg, Opt, SealOptions


def seal(options: SealOptions) -> None:
    """Write a job to a file from which others train it without its source."""
    from flockstep.experiments import sealing

    print(sealing.seal_job(options))


def public_key(key: Annotated[Path, Arg("File with a private key, which flockstep secret wrote.")]) -> None:
    """Print the public key of a private key: give it to those who trust your jobs, or who encrypt files to you."""
    from flockstep.sealed.archive import KeyPair

    print(KeyPair.read(key).public)


def pack_run(
    run: o.RunFolderArgument,
    out: Annotated[Path, Opt("File to write.")] = Path("run.returned"),
    overwrite: Annotated[bool, Opt("Replace the file of --out if it exists.")] = False,
    sign: Annotated[Path | None, Opt("File with your private key; the file is signed with it.", metavar="KEY")] = None,
    encrypt_to: Annotated[
        Path | None, Opt("File with the public key of the sender, to whom alone the file is readable.", metavar="KEY")
    ] = None,
) -> None:
    """Write the result of a run of a sealed job to a file for the sender of the job, and list what the file tells of
    your data.
    """
    from flockstep.experiments import sealing

    told = sealing.pack_run(run, out, sign=sign, encrypt_to=encrypt_to, overwrite=overwrite)
    print(f"{out} holds no samples and no paths. It tells who can read it:", *told, sep="\n- ")


def unseal(
    run: Annotated[Path, Arg("File that flockstep return wrote, or the folder of a run.")],
    out: Annotated[Path, Opt("Folder to write; must not exist.")] = Path("unsealed"),
    names: Annotated[
        Path | None, Opt("File with the names that flockstep seal --rename has replaced.", metavar="FILE")
    ] = None,
    key: Annotated[Path | None, Opt("Private key to which the file is encrypted.", metavar="KEY")] = None,
    trust: Annotated[
        Path | None,
        Opt(
            "File with the public keys of which one must have signed the file (default: whoever has signed it, or "
            "nobody).",
            metavar="FILE",
        ),
    ] = None,
) -> None:
    """Write the trained weights of a sealed job under their own names, and the record of the run, to a folder."""
    from flockstep.experiments import sealing

    print(sealing.unseal(run, out, names=names, key=key, trust=trust))
