"""`flockstep reproduce`: checks published results, and prints the published and the measured figures with a verdict."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import msgspec
from click.exceptions import Exit
from rich.markup import escape

from flockstep import registry
from flockstep.cli import options as o
from flockstep.cli import show
from flockstep.errors import ConfigurationError
from flockstep.options import Arg, Opt
from flockstep.report.terminal import TableColumn, TextTable
from flockstep_lab.claims.base import Claim
from flockstep_lab.cli.verdicts import require_page, write_verdict

LEGEND = (
    "quick: takes a few seconds at most. flockstep reproduce A5 checks one claim and prints its setting, its limits "
    "and its result; --all checks all claims, which takes minutes."
)


def reproduce(
    claims: Annotated[tuple[str, ...], Arg("Claims to check, such as A5 (default: list all claims).")] = (),
    everything: Annotated[bool, Opt("Check every claim; this takes minutes.", names=("--all",))] = False,
    strict: Annotated[bool, Opt("Exit with code 1 if a claim does not hold.", names=("--strict/--no-strict",))] = False,
    write: Annotated[bool, Opt("Write the verdicts to docs/explanation/claims.md of a clone.")] = False,
    as_json: o.Json = False,
) -> None:
    """Reproduce published results: print the published figure, the measured figure, and whether the claim holds."""
    if not claims and not everything:
        list_claims(as_json)
        return
    raise Exit(check_claims(claims, everything, strict, as_json, write))


def known() -> list[str]:
    """Return the names of all claims, sorted by letter, then by number."""
    return sorted(registry.names("claim"), key=_order)


def check_claims(names: Sequence[str], everything: bool, strict: bool, as_json: bool, write: bool = False) -> int:
    """Check the named claims, print their verdicts, and write them to the page of claims; return the exit code.

    Raises:
        ConfigurationError: no claim is named, or both names and `everything` are given.
    """
    if everything == bool(names):
        raise ConfigurationError(
            f"no claim was named; name at least one claim, or give --all; known claims: {', '.join(known())}"
        )
    claims = {name: Claim.parse(name) for name in (known() if everything else names)}
    if write:
        require_page()
    results = []
    with show.status() as tell:
        for number, (name, claim) in enumerate(claims.items()):
            tell(name, number, len(claims))
            results.append(_tried(name, claim))
            if write:
                write_verdict(results[-1], known())
    if as_json:
        show.json({"claims": results, "held": sum(r["holds"] for r in results), "tried": len(results)})
    else:
        _print(results)
    return int(strict and not all(result["holds"] for result in results))


def list_claims(as_json: bool) -> None:
    """Print a table of all claims, without checking them."""
    rows = [{"claim": name, **_described(Claim.parse(name))} for name in known()]
    if as_json:
        show.json(rows)
        return
    columns = (
        TableColumn("claim", text=True),
        TableColumn("statement", text=True),
        TableColumn("source", text=True, rank=1),
        TableColumn("quick", text=True),
    )
    cells = [[row["claim"], row["statement"], row["source"], "yes" if row["quick"] else ""] for row in rows]
    show.page().print(TextTable(columns, cells, notes=(LEGEND,)))


def _described(claim: Claim) -> dict[str, Any]:
    texts = {name: getattr(claim, name) for name in ("statement", "source", "setting", "tolerance")}
    return {**texts, "quick": claim.quick}


def _tried(name: str, claim: Claim) -> dict[str, Any]:
    began = time.monotonic()
    show.console.print(f"{name}: {claim.statement}", markup=False, highlight=False)
    verdict = claim.check(_say(name))
    seconds = time.monotonic() - began
    show.console.print(f"{name}: {'holds' if verdict.holds else 'falls short'} ({seconds:.0f} s)", highlight=False)
    return {
        "claim": name,
        **_described(claim),
        "holds": verdict.holds,
        "rows": msgspec.to_builtins(verdict.rows),
        "reason": verdict.reason,
        "figures": verdict.figures,
        "seconds": round(seconds, 1),
    }


def _say(name: str) -> Callable[[str], None]:
    return lambda line: show.console.print(f"{name}: {line}", markup=False, highlight=False)


def _print(results: Sequence[dict[str, Any]]) -> None:
    page = show.page()
    for result in results:
        columns = [TableColumn(name, text=True) for name in ("quantity", "published", "here", "verdict")]
        cells = [
            [row["what"], _text(row["published"]), _text(row["ours"]), "holds" if row["holds"] else "falls short"]
            for row in result["rows"]
        ]
        title = f"{result['claim']}  {result['statement']}"
        page.print(TextTable(columns, cells, title, marks={"holds": "green", "falls short": "red"}))
        for label in ("source", "setting", "tolerance", "reason"):
            if result[label]:
                page.print(f"  {label}: {escape(result[label])}", highlight=False)
        page.print()
    held = sum(result["holds"] for result in results)
    short = ", ".join(result["claim"] for result in results if not result["holds"])
    page.print(f"{held} of {len(results)} claims hold" + (f"; short: {short}" if short else ""), highlight=False)


def _text(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.5g}"


def _order(name: str) -> tuple[str, int]:
    found = re.fullmatch(r"([A-Z]+)(\d+)", name)
    return (found[1], int(found[2])) if found else (name, 0)


app = reproduce
