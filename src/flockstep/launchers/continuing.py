"""`--resume`: a command that is started again continues its own run, if there is a run to continue."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path

from flockstep.errors import ConfigurationError
from flockstep.launchers.wait_monitor import on_stderr
from flockstep.links.kinds import Tcp, Transport
from flockstep.records import checkpoints as disk
from flockstep.records.config import RunConfig, same_run
from flockstep.records.folder import RunFolder


@dataclass(frozen=True)
class Continuation:
    """Whether a command continues the run that its folder holds, or starts a run there."""

    resumes: bool = False
    """Whether the run continues from a checkpoint; otherwise, the run starts from the beginning."""
    overwrites: bool = False
    """Whether the new run replaces the run in the folder, which has no checkpoint."""


def continuation(config: RunConfig, folder: Path) -> Continuation:
    """Return whether a command continues the run in a folder; all defaults of the configuration must be filled in.

    The transport is None if the command does not name one.

    Raises:
        ConfigurationError: the folder holds another run, or a run that has ended.
    """
    record = RunFolder(folder)
    if record.begun is None:
        return Continuation()
    held = record.read_config()
    if config.kind == "launch" and not config.strategy_given:  # the script has named its strategy
        config = replace(config, strategy=held.strategy)
    if not any(_same(config, one) for one in (held, *_kept(record, config))):
        name = next(name for name in _names() if getattr(config, name) != getattr(held, name))
        raise ConfigurationError(
            f"{folder} holds another run: its {name} is {getattr(held, name)}, and this command's is "
            f"{getattr(config, name)}; repeat the command of that run, or choose another folder with --out"
        )
    if not record.unfinished:
        raise ConfigurationError(f"{folder} holds a run that has ended; start another run in another folder")
    if any((one / disk.MANIFEST).exists() for one in disk.folders(record.path)):
        return Continuation(resumes=True)
    on_stderr(f"{folder} holds no complete checkpoint, so the run starts from the beginning")
    return Continuation(overwrites=True)


def _kept(record: RunFolder, config: RunConfig) -> list[RunConfig]:
    """Configurations of the run before its workers changed."""
    files = (record.path / disk.CHECKPOINTS).glob("*.toml")
    kept = [RunConfig.from_toml(file.read_text(), str(file)) for file in files]
    return [replace(one, strategy=config.strategy) if config.kind == "launch" else one for one in kept]


def _same(command: RunConfig, held: RunConfig) -> bool:
    """Whether two configurations are of one run, whose hosts may have other addresses; a command without a transport
    takes that of the run.
    """
    transport = None if command.transport is None else _anywhere(held)
    return same_run(replace(command, transport=_anywhere(command)), replace(held, transport=transport))


def _anywhere(config: RunConfig) -> str | None:
    """The transport of a configuration, without the address of the host."""
    if config.transport is None:
        return None
    found = Transport.parse(config.transport)
    return str(replace(found, host=Tcp.host) if isinstance(found, Tcp) else found)


def _names() -> list[str]:
    """Names of the settings, of which the transport is the last, as it may differ."""
    return [*(field.name for field in fields(RunConfig) if field.name not in ("versions", "transport")), "transport"]
