"""The tree of flockstep's errors, divided by the decisions that a caller can take.

FlockstepError
├── ConfigurationError      the input is wrong; nothing was started (exit code 2)
│   ├── UnknownName         no such strategy, codec, argument, …; names the nearest right one
│   ├── CompositionError    two parts that do not compose; names a legal combination
│   ├── SchemaMismatch      two nodes hold models of different shape
│   └── MissingDependency   an optional package is not installed; names the command that installs it
└── RunError                the run itself failed; what was computed is kept (exit code 1)
    ├── PeerLost            a node died or stopped responding while another needed it
    ├── ProtocolError       a message broke the wire format or its sequence
    ├── TimedOut            a call has waited for as long as its timeout allows
    ├── Diverged            a loss or a gradient is not finite
    └── Interrupted         the user, or the system, asked the run to stop
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

RENAMED = {
    "rule": "server_update",
    "rules": "server_updates",
    "outer": "outer_optimizer",
    "outers": "outer_optimizers",
    "period": "synchronization_schedule",
    "periods": "synchronization_schedules",
    "demo": "decoupled_momentum",
    "one_forward_one_backward": "1f1b",
    "completeness": "delivery",
    "cell": "taxonomy_entry",
    "on": "bind_shapes",
    "at": "bind_step",
    "among": "bind_workers",
    "--need": "--require",
    "--way": "--implementation",
    "t": "seconds",
    "compute": "compute_seconds",
    "wait": "wait_seconds",
    "comm": "comm_seconds",
    "sent": "sent_bytes",
    "received": "received_bytes",
    "bytes": "sent_bytes",
    "figure": "scalar",
    "figures": "scalars",
    "time_to_target": "seconds_to_target",
    "sent_per_worker": "sent_bytes_per_worker",
    "received_per_worker": "received_bytes_per_worker",
}
"""Former name of an option, a component, an argument or a field of the record → current name.

Such a name is refused everywhere; the error names the current name.
"""

ELSEWHERE = {"sharded_optimizer": "scatter_reduce"}
"""Name that other libraries use → flockstep's name."""
_QUANTITY = re.compile(r"[0-9.]+[a-z]?")
"""Number and first letter of the unit at the beginning of a name, such as 10m."""
SHOWN = 20
"""Largest number of known names that an error lists. If there are more names, the error names a command that lists all
of them.
"""


SHOWS_TRACEBACK = "; --debug shows the traceback"
"""Clause at the end of the sentence about an error of a user's code."""


class FlockstepError(Exception):
    """Base class of all errors that flockstep raises on purpose."""

    exit_code = 1


class ConfigurationError(FlockstepError, ValueError):
    """Error: the input is wrong, and nothing was started."""

    exit_code = 2


def require(holds: bool, name: str, rule: str, value: object, way_out: str) -> None:
    """Check a setting or a hyper-parameter.

    Raises:
        ConfigurationError: `holds` is false, as for every comparison with NaN; the message contains the value, the
        rule and a valid alternative.
    """
    if not holds:
        raise ConfigurationError(f"{name} must be {rule}, got {value}; {way_out}")


class UnknownName(ConfigurationError):
    """Error: no component or setting has the given name."""

    @classmethod
    def among(
        cls,
        kind: str,
        name: str,
        known: Iterable[str],
        listed: Iterable[str] | None = None,
        command: str | None = None,
        further: str = "",
    ) -> UnknownName:
        """Return the error for `name`, with the way out: the current name if `name` was renamed, otherwise the most
        similar name in `known`.

        If no name is similar, the error lists the names in `listed`, or all known names. If more than `SHOWN` names are
        known and `command` is given, the error names this command, which lists them. `further` is a clause that says
        how values without a name are written. A name that begins with a quantity, such as 10mbit, is similar only to
        names with the same quantity; every other name only to names with the same first letter, because a name that
        shares only its end with another one, such as codec with nodes, is seldom meant.
        """
        names = sorted(known)
        quantity = _QUANTITY.match(name.lower())
        bare = name.lower().lstrip("-")
        start = bare[:1] if quantity is None else quantity[0]
        alike = {one.lower().lstrip("-"): one for one in names if one.lower().lstrip("-").startswith(start)}
        near = difflib.get_close_matches(bare, alike, n=1, cutoff=0.6)
        if (present := RENAMED.get(name)) in names:
            hint = f"it is now called {present!r}"
        elif (ours := ELSEWHERE.get(name)) in names:
            hint = f"flockstep calls it {ours!r}"
        elif near:
            hint = f"did you mean {alike[near[0]]!r}?"
        elif command is not None and len(names) > SHOWN:
            hint = f"{command} shows all"
        else:
            hint = f"known: {', '.join(names if listed is None else sorted(listed)) or 'none'}"
        if further and not near:
            hint += f"; {further}"
        return cls(f"no {kind} is called {name!r}; {hint}")


class CompositionError(ConfigurationError):
    """Error: two parts of a run cannot be combined."""


class SchemaMismatch(ConfigurationError):
    """Error: two nodes hold models of different shapes."""


class MissingDependency(ConfigurationError):
    """Error: an optional package is not installed."""

    @classmethod
    def of(cls, package: str, extra: str, purpose: str) -> MissingDependency:
        """Return the error for a missing `package`, with the command that installs the extra `extra`."""
        return cls(
            f"{purpose} needs {package}, which is not installed; install it with: pip install 'flockstep[{extra}]'"
        )


class RunError(FlockstepError):
    """Error: the run itself failed; the results computed until then are kept."""


class PeerLost(RunError):
    """Error: a node died or stopped responding while another node needed it."""


class ProtocolError(RunError):
    """Error: a message violates the wire format, or messages arrived out of sequence."""


class TimedOut(RunError, TimeoutError):
    """Error: a call has waited for as long as its timeout allows."""


class Diverged(RunError):
    """Error: a loss or a gradient is not finite."""


class Interrupted(RunError):
    """Error: the user or the system asked the run to stop."""


def in_short(error: BaseException) -> str:
    """Return the type of an error and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
"""Code of a control character → its escape sequence in Python."""


def printable(text: str) -> str:
    """Return a text whose control characters are written as escape sequences, which a terminal only shows."""
    return text.translate(_CONTROLS)


def of_kind(kind: str, reason: str, note: str = "") -> FlockstepError:
    """Return the error that another process has raised, given the name of the error's type, its message, and the place
    where it was raised.
    """
    error = {sub.__name__: sub for sub in _tree(FlockstepError)}.get(kind, RunError)(reason)
    if note:
        error.add_note(note)
    return error


def _tree(kind: type[FlockstepError]) -> list[type[FlockstepError]]:
    return [kind, *(found for sub in kind.__subclasses__() for found in _tree(sub))]
