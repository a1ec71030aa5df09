"""`flockstep reproduce --write`: writes the newest verdict on every claim to the documentation page."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flockstep.errors import ConfigurationError

PAGE = Path("docs") / "explanation" / "claims.md"
BEGIN, END = "<!-- verdicts -->\n", "<!-- end verdicts -->"
HEAD = "| claim | tried on | verdict | figures (published) |\n| --- | --- | --- | --- |\n"
UNTRIED = "| {} | – | not tried | |"
"""Row of a claim without a verdict."""
SHOWN = 3
"""Number of figures that are shown for a claim in addition to the figures that do not hold."""


def require_page(page: Path = PAGE) -> None:
    """Raise `ConfigurationError` unless the page of claims exists and has a table for verdicts."""
    if not page.is_file() or BEGIN not in page.read_text("utf-8"):
        raise ConfigurationError(
            f"--write needs {page} with its table of verdicts, got none; run the command in the root folder of a clone"
        )


def write_verdict(result: Mapping[str, Any], order: list[str], page: Path = PAGE) -> None:
    """Replace a claim's row in the table with the new verdict; `order` holds the names of all claims."""
    before, _, rest = page.read_text("utf-8").partition(BEGIN)
    old, _, after = rest.partition(END)
    rows = {line.split("|")[1].strip(): line for line in old.removeprefix(HEAD).splitlines() if line}
    rows[str(result["claim"])] = row(result)
    kept = "".join(f"{rows.get(name, UNTRIED.format(name))}\n" for name in order)
    page.write_text(f"{before}{BEGIN}{HEAD}{kept}{END}{after}", "utf-8")


def row(result: Mapping[str, Any]) -> str:
    """Return one row of the table of claims: the figures that do not hold, then the first figures that hold."""
    short = [_figure(one) for one in result["rows"] if not one["holds"]]
    held = [_figure(one) for one in result["rows"] if one["holds"]]
    more = len(held) - SHOWN
    figures = [f"falls short: {one}" for one in short] + held[:SHOWN] + ([f"{more} more that hold"] if more > 0 else [])
    verdict = "holds" if result["holds"] else "falls short"
    cells = (result["claim"], f"{datetime.now(UTC):%Y-%m-%d}", verdict, "; ".join(figures))
    return "| " + " | ".join(str(cell).replace("|", "/").replace("\n", " ") for cell in cells) + " |"


def _figure(one: Mapping[str, Any]) -> str:
    ours, published = (
        f"{one[name]:.4g}" if isinstance(one[name], float) else one[name] for name in ("ours", "published")
    )
    return f"{one['what']} {ours} ({published})"
