import base64
import gzip
import html
import io
import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from flockstep.errors import ConfigurationError
from flockstep.records import RunConfig, summarize
from flockstep.records.config import SPLIT
from flockstep.records.events import ClockEvent, EvaluationEvent, Event, LostEvent, UpdateEvent
from flockstep.records.folder import Record
from flockstep.report import formatting
from flockstep.report.figures import per_step, per_worker, progress, staleness, timeline
from flockstep.report.findings import findings
from flockstep.report.html import render, write_report
from flockstep.report.ranking import labels
from flockstep.report.style import Series
from flockstep.report.table import table
from support.records import RUNS, invent


@pytest.fixture(scope="module")
def records() -> list[Record]:
    return [invent(made, seed) for seed, made in enumerate(RUNS)]


@pytest.fixture(scope="module")
def page(records: list[Record]) -> str:
    return render(records)


def series_of(records: list[Record]) -> list[Series]:
    names = labels([record.summary for record in records])
    return [Series(name, record, place) for place, (name, record) in enumerate(zip(names, records, strict=True))]


class Reader(HTMLParser):
    """Collects tags and their attributes, and fails on one that is closed but was not open."""

    VOID = frozenset({"meta", "br", "img", "link", "input", "hr"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.scripts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, "closed in another order"

    def handle_data(self, data: str) -> None:
        (self.scripts if self.open and self.open[-1] == "script" else self.text).append(data)


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    return reader


def test_the_page_is_well_formed_and_loads_nothing(page: str) -> None:
    reader = read(page)
    for tag, attributes in reader.tags:
        for name in ("src", "href", "srcset", "data", "action"):
            assert name not in attributes, f"{tag} has {name}"
    style = page[page.index("<style>") : page.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    policy = [a["content"] for tag, a in reader.tags if tag == "meta" and a.get("http-equiv")]
    assert policy[0] is not None
    assert policy[0].startswith("default-src 'none'")
    assert "http" not in policy[0]


def test_nothing_on_the_page_uploads_data(page: str) -> None:
    drawing = next(code for code in read(page).scripts if "Plotly.newPlot(place" in code)
    assert '"sendChartToCloud"' in drawing
    assert 'plotlyServerURL: ""' in drawing


def test_the_reader_notices_a_broken_page() -> None:
    with pytest.raises(AssertionError, match="closed in another order"):
        read("<p><b>bold</p>")


def test_the_page_carries_the_drawing_library_once_and_is_small(page: str) -> None:
    packed = re.findall(r'<script type="text/plain" id="plotly">(.*?)</script>', page)
    assert len(packed) == 1
    code = gzip.decompress(base64.b64decode(packed[0], validate=True))
    assert code.startswith(b"/**\n* plotly.js (cartesian - minified) v4.1.1\n")
    assert len(page) < 1_500_000


@pytest.mark.skipif(shutil.which("node") is None, reason="runs the page's script in node")
def test_the_library_is_unpacked_before_anything_is_drawn(page: str, tmp_path: Path) -> None:
    unpack = next(code for code in read(page).scripts if "DecompressionStream" in code)
    packed = re.findall(r'<script type="text/plain" id="plotly">(.*?)</script>', page)[0]
    (tmp_path / "packed").write_text(packed)
    (tmp_path / "page.js").write_text(
        """
const packed = require("fs").readFileSync(process.argv[2], "utf8"), added = [];
const document = {
  getElementById: () => ({textContent: packed}), createElement: () => ({}), head: {appendChild: one => added.push(one)},
};
"""
        + unpack
        + 'whenPlotlyIsThere(() => console.log(added.length, added[0].textContent.split("\\n")[1]));'
    )
    command = ["node", str(tmp_path / "page.js"), str(tmp_path / "packed")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "1 * plotly.js (cartesian - minified) v4.1.1\n"


def test_every_strategy_is_in_the_table_and_in_the_details(page: str, records: list[Record]) -> None:
    text = " ".join(read(page).text)
    for record in records:
        assert text.count(record.config.strategy) >= 2, record.config.strategy
        assert record.config.command in text
    assert "ps(consistency=ssp(4))" not in text


def test_the_clock_is_said_plainly(records: list[Record], page: str) -> None:
    assert "Virtual seconds: gradients are real, time is modeled" in page
    assert "Real seconds" not in page
    real = render([invent(RUNS[0], kind="train")])
    assert "Real seconds: measured on real processes" in real
    assert "irtual seconds" not in "".join(read(real).text)


def test_a_failed_run_is_listed_with_its_reason(page: str) -> None:
    text = " ".join("".join(read(page).text).split())
    assert "failed after" in text
    assert "loss of worker 2 at step 125 is not finite" in text
    assert "worker 2 lost after" in text


def test_data_on_the_page_is_json_that_plotly_accepts(page: str) -> None:
    import plotly.graph_objects as go

    blocks = re.findall(r'<script type="application/json" id="data-([\w-]+)">(.*?)</script>', page, re.DOTALL)
    assert [name for name, _ in blocks] == ["progress", "per-step", "per-worker", "staleness", "timeline"]
    for _, text in blocks:
        figure = json.loads(text)
        assert len(go.Figure(figure).data) == len(figure["data"]) > 0
    with pytest.raises(ValueError, match="property"):
        go.Figure({"data": [{"type": "bar", "color": "red"}], "layout": {}})


EVIL = "</script><script>alert(1)</script><b>&\"'"


def test_what_users_write_is_never_markup(tmp_path: Path) -> None:
    record = invent(RUNS[0])
    config = replace(record.config, strategy=EVIL, job=EVIL, facts={EVIL: EVIL})
    summary = summarize(config, [*record.events, LostEvent(1.0, 1, EVIL)], "failed", EVIL)
    plain = render([record])
    page = render([Record(config, summary, record.events)])
    tags = [tag for tag, _ in read(page).tags]
    assert tags.count("script") == [tag for tag, _ in read(plain).tags].count("script")
    assert "alert(1)" not in "".join(code for code in read(page).scripts if "Plotly.newPlot" in code)
    blocks = re.findall(r'<script type="application/json" id="[\w-]+">(.*?)</script>', page, re.DOTALL)
    for block in blocks:
        assert "<" not in block
        assert "<script" not in block.encode().decode("unicode_escape")


def test_the_report_is_written_where_asked(tmp_path: Path) -> None:
    path = write_report([invent(RUNS[0])], tmp_path / "new" / "report.html")
    assert path.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def test_real_and_virtual_runs_share_no_report() -> None:
    with pytest.raises(ConfigurationError, match="different clocks are not comparable, got real and virtual"):
        render([invent(RUNS[0]), invent(RUNS[1], kind="train")])
    with pytest.raises(ConfigurationError, match="at least one run"):
        render([])


def test_a_run_that_left_next_to_nothing_is_still_reported() -> None:
    config = RunConfig(kind="train", job="j", strategy="gossip", workers=2, metric="accuracy", target=0.9)
    events: list[Event] = [LostEvent(0.5, 1, "killed")]
    empty = Record(config, summarize(config, events, "interrupted", "stopped by Ctrl-C"), events)
    page = render([empty])
    assert "stopped by Ctrl-C" in page
    assert "&gt; " in page  # the target was not reached in so many seconds
    assert 'class="plot"' not in page
    read(page)


def test_what_a_partition_changes_is_a_finding_and_no_version() -> None:
    said = "grid(rows=1, columns=2) does not divide all layers: every worker computes layer '0'."
    versions = {"torch": "2.13.0", SPLIT: said}
    config = RunConfig(kind="train", job="j", strategy="gossip", workers=2, partition="grid(1, 2)", versions=versions)
    record = Record(config, summarize(config, [LostEvent(0.5, 1, "killed")], "interrupted"), [])
    text = " ".join("".join(read(render([record])).text).split())
    assert text.count(said) == 2, "among the findings, and in the settings as they are"
    assert f"{said}." not in text
    assert "versions torch 2.13.0 " in text


def test_twelve_runs_look_different(records: list[Record]) -> None:
    series = series_of([invent(made, 1) for made in RUNS] + [invent(made, 2) for made in RUNS[:4]])
    assert len({(one.color, one.stroke) for one in series}) == 12
    assert len({one.color for one in series}) == 12
    assert len({one.label for one in series}) == 12


def test_each_run_has_one_color_in_all_figures(records: list[Record]) -> None:
    series = series_of(records)
    curves = {(t["name"], t["line"]["color"]) for t in progress(series)["data"] if t["mode"] == "lines"}
    bars = staleness(series)
    assert bars is not None
    histograms = {(t["name"], t["marker"]["color"]) for t in bars["data"]}
    assert curves == {(one.name, one.color) for one in series}
    assert histograms <= curves


def test_progress_draws_exactly_the_evaluations(records: list[Record]) -> None:
    series = series_of(records[:1])
    shots = [event for event in records[0].events if isinstance(event, EvaluationEvent)]
    lines = [trace for trace in progress(series)["data"] if trace["mode"] == "lines"]
    assert [trace["x"] for trace in lines[:3]] == [
        [s.seconds for s in shots],
        [s.sent_bytes / 1e6 for s in shots],
        [s.samples for s in shots],
    ]
    assert lines[0]["y"] == [s.metric for s in shots]
    assert lines[3]["y"] == [s.loss for s in shots]
    rings = [trace for trace in progress(series)["data"] if trace["mode"] == "markers"]
    assert [trace["x"] for trace in rings] == [
        [records[0].summary.seconds_to_target],
        [(records[0].summary.bytes_to_target or 0) / 1e6],
        [records[0].summary.samples_to_target],
    ]


def test_the_ring_of_a_run_is_drawn_also_where_its_summary_is_a_median(records: list[Record]) -> None:
    middle = replace(records[0], summary=msgspec.structs.replace(records[0].summary, seconds_to_target=0.123))
    hit = [
        [t["x"] for t in progress(series_of([one]))["data"] if t["mode"] == "markers"] for one in (records[0], middle)
    ]
    assert hit[0] == hit[1]
    assert len(hit[0]) == 3


def test_a_step_s_bars_add_up_to_the_recorded_time(records: list[Record]) -> None:
    data = per_step(series_of(records))["data"]
    for index, record in enumerate(records):
        total = sum(worker.seconds for worker in record.summary.per_worker)
        assert sum(trace["x"][index] for trace in data) == pytest.approx(1e3 * total / record.summary.steps)


def test_each_worker_s_shares_add_up_to_one(records: list[Record]) -> None:
    data = per_worker(series_of(records[:1]))["data"]
    assert [sum(trace["y"][rank] for trace in data) for rank in range(4)] == pytest.approx([1.0] * 4)


def test_a_histogram_holds_every_update_also_when_binned() -> None:
    config = RunConfig(kind="train", job="j", strategy="s", workers=200)
    events: list[Event] = [UpdateEvent(1.0, -1, 0, late + 1, late) for late in range(300)]
    figure = staleness(series_of([Record(config, summarize(config, events, "finished"), events)]))
    assert figure is not None
    (trace,) = figure["data"]
    assert len(trace["x"]) <= 41
    assert sum(trace["y"]) == pytest.approx(1.0)
    assert sum(count for _, count in trace["customdata"]) == 300 * 301 // 2


def test_no_staleness_and_no_spans_mean_no_figure() -> None:
    config = RunConfig(kind="train", job="j", strategy="s", workers=1)
    series = series_of([Record(config, summarize(config, [], "finished"), [])])
    assert staleness(series) is None
    assert timeline(series) is None


def test_the_timeline_of_many_workers_shows_a_few() -> None:
    figure = timeline(series_of([invent(replace(RUNS[1], comm=0.001), workers=40)]))
    assert figure is not None
    names = figure["layout"]["yaxis"]["ticktext"]
    assert names == [*(f"worker {rank}" for rank in range(8)), "server 0"]
    assert max(max(trace["y"]) for trace in figure["data"]) == 8


def test_the_timeline_says_how_well_clocks_were_compared(records: list[Record]) -> None:
    said = "agrees with the launcher&#39;s clock to within 3.00 ms"
    clocks = [ClockEvent(0.0, node, 5.0, error) for node, error in ((0, 0.001), (1, 0.003))]
    assert said not in render(records)
    assert said in render([replace(one, events=[*clocks, *one.events]) for one in records])


def test_the_findings_name_the_first_and_the_reason(records: list[Record]) -> None:
    ranked = [records[row] for row in ranking(records)]
    series = series_of(ranked)
    sentences = findings([one.record.summary for one in series])
    best, worst = ranked[0].summary, ranked[-2].summary
    assert sentences[0].startswith(
        f"{best.strategy} reached accuracy 0.95 first, after {formatting.number(best.seconds_to_target)} virtual s"
    )
    assert any(worst.strategy in text and "samples" in text for text in sentences[1:])
    assert "virtual" in sentences[-1]
    assert not any("partial" in text for text in sentences[:1])


def ranking(records: list[Record]) -> list[int]:
    from flockstep.report.ranking import order

    return order([record.summary for record in records])


def test_the_reason_is_an_identity() -> None:
    """Time ratio = samples ratio ÷ speed ratio: the sentence gives the latter two of hand-made figures."""
    pair = []
    for name, t, samples in (("quick", 2.0, 3000), ("slow", 8.0, 1500)):
        config = RunConfig(kind="train", job="j", strategy=name, workers=1, metric="accuracy", target=0.9)
        events: list[Event] = [
            EvaluationEvent(0.0, 0, 0, 0.0, 2.0, 0.1, None),
            EvaluationEvent(t, 1, samples, 1e6, 0.1, 0.95, None),
        ]
        pair.append(Record(config, summarize(config, events, "finished"), events))
    sentences = findings([one.record.summary for one in series_of(pair)])
    assert (
        "quick took 25 % of that time: it needed 2.0 times the samples, but it processed 8.0 times as many"
        in sentences[1]
    )
    assert "evaluations are too far apart" in sentences[0]


def reached(name: str, workers: int, seconds: float | None, before: float = 0.0) -> Series:
    """A run that reached its target in the given interval of seconds, or not at all in 9 s."""
    config = RunConfig(kind="train", job="j", strategy=name, workers=workers, metric="accuracy", target=0.9)
    hits = [] if seconds is None else [EvaluationEvent(seconds, 2, 200, 1e6, 0.1, 0.95, None)]
    events = [
        EvaluationEvent(before, 1, 100, 0.0, 2.0, 0.1, None),
        *hits,
        EvaluationEvent(9.0, 9, 900, 2e6, 0.1, 0.8, None),
    ]
    return Series(name, Record(config, summarize(config, events, "finished"), events), 0, alone=workers == 1)


@pytest.mark.parametrize(
    ("strategy", "alone", "said"),
    [
        ((2.0, 1.9), (6.0, 5.9), r"Several workers were faster than one: .* with 1.3 times the worker-seconds\."),
        ((2.0, 1.0), (2.5, 1.5), "No strategy is known to be faster .*, but the evaluations are too far apart to tell"),
        ((2.5, 1.5), (2.0, 1.0), "No strategy is known to be faster .*, but the evaluations are too far apart to tell"),
        ((6.0, 5.0), (2.0, 1.0), "No strategy was faster than one worker: s reached accuracy 0.9 after 6.00 s, "),
        ((None, 0.0), (2.0, 1.0), "One worker alone reached accuracy 0.9, after 2.00 s, and no strategy .* did"),
        ((2.0, 1.0), (None, 0.0), "One worker alone did not reach accuracy 0.9 in 9.00 s."),
        ((None, 0.0), (None, 0.0), "No run reached accuracy 0.9."),
    ],
)  # fmt: skip
def test_the_first_finding_is_what_the_other_workers_are_worth(
    strategy: tuple[float | None, float], alone: tuple[float | None, float], said: str
) -> None:
    pair = [reached("s", 4, *strategy), reached("all_reduce", 1, *alone)]
    ranked = sorted(pair, key=lambda one: one.record.summary.seconds_to_target or 99)
    assert re.match(said, findings([one.record.summary for one in ranked])[0])


def test_one_worker_is_named_and_dashed_in_every_figure() -> None:
    several, single = invent(RUNS[0]), invent(RUNS[0], workers=1)
    assert labels([several.summary, single.summary]) == ["all_reduce", "one worker"]
    assert labels([single.summary]) == ["all_reduce"]
    page = render([several, single])
    assert page.count("one worker") >= 3
    (figure,) = re.findall(r'id="data-progress">(.*?)</script>', page, re.DOTALL)
    dashes = {trace["name"]: trace["line"]["dash"] for trace in json.loads(figure)["data"] if trace["mode"] == "lines"}
    assert dashes["one worker"] == "5px,3px" != dashes["all_reduce"]


def test_a_target_that_nobody_reached_is_said() -> None:
    records = [invent(made, target=0.999) for made in RUNS[:2]]
    assert findings([one.record.summary for one in series_of(records)])[0].startswith("No run reached accuracy 0.999.")
    assert "no target" in findings([one.record.summary for one in series_of([invent(RUNS[0], target=None)])])[0]
    assert findings([one.record.summary for one in series_of([invent(RUNS[-1])])]) == [
        "No run ended without an error, so there is nothing to compare."
    ]


@pytest.mark.parametrize("width", [80, 100, 160])
def test_the_terminal_table_shows_every_run(records: list[Record], width: int) -> None:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(table([record.summary for record in records]))
    text = console.export_text()
    assert text.count(" finished") - text.count("A finished run") == 7
    for record in records:
        assert record.config.strategy[:10] in text
        assert width < 120 or record.config.strategy in text
    assert "VIRTUAL seconds" in text
    lines = [line.strip() for line in text.splitlines()]
    assert any(line.startswith("1= ") for line in lines)
    assert any(line.startswith(f"{formatting.NONE} ") and "failed" in line for line in lines)


def test_a_table_of_no_runs_is_empty() -> None:
    assert not table([]).rows


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (formatting.number(None), "–"),
        (formatting.number(0.0), "0"),
        (formatting.number(12.345), "12.3"),
        (formatting.number(1234.5), "1,234"),
        (formatting.number(0.01234), "0.0123"),
        (formatting.number(1.2e-5), "1.20e-05"),
        (formatting.seconds(0.0), "0 s"),
        (formatting.seconds(0.0123), "12.3 ms"),
        (formatting.seconds(2e-6), "2.00 µs"),
        (formatting.size(1500), "1.50 kB"),
        (formatting.size(2.5e9), "2.50 GB"),
        (formatting.share(1.0), "100 %"),
        (formatting.share(0.9999), "99.9 %"),
        (formatting.share(0.0), "0 %"),
        (formatting.share(0.0001), "< 0.1 %"),
        (formatting.share(1.25), "125.0 %"),
        (formatting.metric(0.95), "0.9500"),
    ],
)
def test_figures_read_well(text: str, expected: str) -> None:
    assert text == expected


def test_keyboards_and_screen_readers_reach_tables_and_plots(page: str) -> None:
    tags = read(page).tags
    named = {attributes["id"] for _, attributes in tags if attributes.get("id")}
    cells = [attributes for tag, attributes in tags if tag == "th"]
    assert cells
    assert {attributes.get("scope") for attributes in cells} == {"col", "row"}
    scrolled = [attributes for _, attributes in tags if attributes.get("class") == "scroll"]
    assert scrolled
    for attributes in scrolled:
        assert (attributes.get("tabindex"), attributes.get("role")) == ("0", "region")
        assert attributes["aria-labelledby"] in named
    plots = [attributes for _, attributes in tags if "plot" in str(attributes.get("class")).split()]
    assert len(plots) == 5
    for attributes in plots:
        assert attributes.get("role") == "img"
        assert len(str(attributes.get("aria-label"))) > 40
    assert "caption" in [tag for tag, _ in tags]
    assert next(tag for tag, _ in tags if re.fullmatch("h[1-6]", tag)) == "h1"
    assert ":focus-visible" in page


@pytest.mark.parametrize("color", ["#1d2733", "#44505d", "#525d6a", "#175c33", "#8a5300", "#a3161f", "#7a4a00"])
def test_text_stands_out(page: str, color: str) -> None:
    assert color in page
    assert all(contrast(color, behind) >= 4.5 for behind in ("#ffffff", "#f4f6f8", "#f2f8ff", "#eef2f6"))


def contrast(one: str, other: str) -> float:
    """Contrast ratio of two colors (WCAG 2.2)."""

    def light(color: str) -> float:
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        r, g, b = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    low, high = sorted((light(one), light(other)))
    return (high + 0.05) / (low + 0.05)


def falling(factor: float, name: str, period: float) -> Record:
    """A run whose loss falls by a factor from 2, while its error falls from 0.9 to 0.04."""
    config = RunConfig(kind="train", job="j", strategy=name, workers=4, target=0.95, metric="accuracy")
    events: list[Event] = [
        EvaluationEvent(
            k * period, 10 * k, 320 * k, 1e6 * k, 2 * factor ** (-k * period / 12), 1 - 0.9 / (1 + 2 * k), 0.0
        )
        for k in range(13)
    ]
    return Record(config, summarize(config, events, "finished"), events)


LABELS_OF_AXES = """
<iframe src="report.html" style="border: 0; width: 1280px; height: 5000px" id="page"></iframe>
<script>
  page.onload = () => setTimeout(() => {
    const axes = page.contentDocument.querySelectorAll("#plot-progress :is(.xaxislayer-above, .yaxislayer-above)");
    const labels = [...axes].map(axis => [...axis.querySelectorAll("text")].map(label => label.textContent));
    const found = document.createElement("pre");
    document.body.append(Object.assign(found, {id: "found", textContent: JSON.stringify(labels)}));
  }, 8000);
</script>
"""
"""A window of Chromium without a screen is at least 500 pixels wide, so a frame of the wanted width holds the page."""


@pytest.mark.skipif(shutil.which("chromium") is None, reason="draws the page in Chromium")
@pytest.mark.parametrize("factor", [1.1, 10, 1e4])
def test_each_axis_has_three_numbers_in_a_browser(factor: float, tmp_path: Path) -> None:
    write_report([falling(factor, "fast", 1.0), falling(factor, "slow", 0.9)], tmp_path / "report.html")
    frame = tmp_path / "frame.html"
    frame.write_text(LABELS_OF_AXES)
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    own = ["--allow-file-access-from-files", f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=20000"]
    words = ["chromium", *flags, *own, "--dump-dom", frame.as_uri()]
    dom = subprocess.run(words, capture_output=True, text=True, check=True, timeout=120).stdout
    found = re.search(r'<pre id="found">(.*?)</pre>', dom)
    assert found is not None
    layers = [layer for layer in json.loads(html.unescape(found[1])) if layer]
    assert len(layers) >= 8
    assert all(len(layer) >= 3 and sorted(map(float, layer)) == list(map(float, layer)) for layer in layers), layers
