import math
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flockstep.arrays.schema import Schema
from flockstep.errors import ConfigurationError, SchemaMismatch, UnknownName
from flockstep.records import EventWriter, RunConfig, RunFolder, same_run, summarize
from flockstep.records.events import (
    EvaluationEvent,
    Event,
    LostEvent,
    MetricEvent,
    NodeEvent,
    ScalarEvent,
    SpanEvent,
    StepEvent,
    UpdateEvent,
)
from flockstep.records.folder import read_event_file

CONFIG = RunConfig(
    kind="train", job="digits", strategy="ps(consistency=ssp(3))", workers=4, seed=1, lr=0.1, target=0.95
)


def step(t: float, rank: int = 0, number: int = 1) -> StepEvent:
    return StepEvent(t, rank, number, 0.5, 0.1, 0.2, 0.3, 10, 20, 1, 2)


EVENTS: list[Event] = [
    step(0.5),
    UpdateEvent(0.6, -1, 0, 2, 1),
    SpanEvent(0, "compute", 0.0, 0.7),
    EvaluationEvent(0.8, 1.0, 32, 10.0, 0.4, 0.9, None),
    LostEvent(0.9, 2, "killed"),
    NodeEvent(0, 1.0, 1, 0.1, 0.2, 0.3, 10, 20, 1, 2, 128, "ab"),
]


def test_notes_of_a_run_outlive_its_launcher(tmp_path: Path) -> None:
    """No launcher wrote a summary: the notes are in the events."""
    record = RunFolder(tmp_path / "run")
    record.path.mkdir()
    record.write_config(CONFIG)
    record.note(1.0, ["1 worker joined"])
    for _ in range(2):
        with record.resumed(2.0, {}):
            record.note(2.0, ["resumed from step 3"])
    assert record.read_summary().notes == ["1 worker joined", "resumed from step 3", "resumed from step 3"]


def test_a_metric_of_the_last_step_in_a_checkpoint_outlives_the_resumption(tmp_path: Path) -> None:
    """The script has recorded it after that step, and continues behind that place."""
    record = RunFolder(tmp_path / "run")
    record.path.mkdir()
    record.write_config(CONFIG)
    with EventWriter(record.node_events_file(0)) as events:
        for number in (1, 2, 3):
            events.write(MetricEvent(number + 0.5, 0, number, "accuracy", 0.5, True))
    with record.resumed(2.0, {0: 2}):
        kept = record.read_events()
    assert [event.step for event in kept if isinstance(event, MetricEvent)] == [1, 2]


def test_steps_lost_from_before_a_checkpoint_are_told_once(tmp_path: Path) -> None:
    """As after a power cut: a file of events is gone, another one ends early."""
    record = RunFolder(tmp_path / "run")
    record.path.mkdir()
    record.write_config(CONFIG)
    for rank, steps in ((0, 0), (1, 3), (2, 5)):
        with EventWriter(record.node_events_file(rank)) as events:
            for step in range(1, steps + 1):
                events.write(StepEvent(0.1 * step, rank, step, 0.5, 0.1, 0.2, 0.3, 10, 20, 1, 2))
    texts = [
        f"the record lacks the events of {lost} steps of worker {rank}, which were lost before the run was resumed; "
        "figures made from events, such as completeness, lack these steps"
        for rank, lost in ((0, 4), (1, 1))
    ]
    for told in (texts, []):
        with record.resumed(0.45, {0: 4, 1: 4, 2: 4}) as (dropped, lost):
            assert (dropped, lost) == (len(told) // 2, told)
            record.note(0.45, lost)
    assert record.read_summary().notes == texts
    assert record.read_summary().completeness is None


def test_a_run_whose_workers_changed_lacks_no_steps(tmp_path: Path) -> None:
    """Steps are counted anew then; the checkpoints of such a run keep its configurations."""
    record = RunFolder(tmp_path / "run")
    (record.path / "checkpoints").mkdir(parents=True)
    (record.path / "checkpoints" / "0123.toml").touch()
    with EventWriter(record.node_events_file(0)) as events:
        for step in (1, 2, 7, 8):
            events.write(StepEvent(0.1 * step, 0, step, 0.5, 0.1, 0.2, 0.3, 10, 20, 1, 2))
    with record.resumed(1.0, {0: 8, 1: 8}) as (_, lost):
        assert lost == []


@given(
    st.builds(
        RunConfig,
        kind=st.sampled_from(["train", "simulate"]),
        job=st.text(),
        strategy=st.text(),
        workers=st.integers(1, 1000),
        seed=st.integers(0, 2**62),
        steps=st.none() | st.integers(1, 10),
        epochs=st.none() | st.floats(0.1, 100),
        lr=st.none() | st.floats(1e-300, 1e300),
        network=st.none() | st.text(),
        facts=st.dictionaries(st.text(), st.text(), max_size=3),
    )
)
def test_a_configuration_survives_toml_exactly(config: RunConfig) -> None:
    assert RunConfig.from_toml(config.to_toml()) == config


def test_an_unknown_setting_is_named_with_the_nearest() -> None:
    with pytest.raises(UnknownName, match=r"no setting in config\.toml is called 'workesr'; did you mean 'workers'"):
        RunConfig.from_toml(CONFIG.to_toml().replace("workers", "workesr"))


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("kind = ", "not a TOML document"),
        ('kind = "train"', "missing required field `job`"),
        ('kind = "train"\njob = "d"\nstrategy = "s"\nworkers = "4"', "workers"),
        ('kind = "race"\njob = "d"\nstrategy = "s"\nworkers = 4', "kind"),
        ('kind = "train"\njob = "d"\nstrategy = "s"\nworkers = 0', "workers must be >= 1, got 0"),
    ],
)
def test_a_wrong_configuration_says_what_is_wrong(text: str, what: str) -> None:
    with pytest.raises(ConfigurationError, match=what):
        RunConfig.from_toml(text, "there.toml")


def test_same_run_ignores_versions_and_nothing_else() -> None:
    assert same_run(CONFIG, replace(CONFIG, versions={"flockstep": "9"}))
    assert not same_run(CONFIG, replace(CONFIG, seed=2))
    assert not same_run(CONFIG, replace(CONFIG, facts={"data": "other"}))


def test_the_command_repeats_the_run_and_is_quoted() -> None:
    assert CONFIG.command == (
        "flockstep train digits --strategy 'ps(consistency=ssp(3))' --workers 4 --seed 1 --target 0.95 --lr 0.1"
        " --split iid"
    )
    evil = RunConfig(kind="simulate", job="my job.py; rm -rf .", strategy="s", workers=1, epochs=2.0)
    assert "'my job.py; rm -rf .'" in evil.command
    assert "--epochs 2 " in evil.command
    both = replace(evil, steps=5).command
    assert "--steps 5" in both
    assert "--epochs" not in both, "steps take precedence"


def test_a_launched_script_is_repeated_with_the_launcher_s_options_only() -> None:
    config = RunConfig(
        kind="launch", job="train.py", strategy="gossip", workers=2, transport="ipc", heartbeat=5.0, lr=0.1
    )
    assert config.command == "flockstep launch --workers 2 --seed 0 --heartbeat 5 --transport ipc train.py"
    assert config.clock == "real"


def test_a_loss_that_is_not_finite_comes_back_as_nan(tmp_path: Path) -> None:
    with EventWriter(tmp_path / "e.jsonl") as writer:
        writer.write(step(1.0))
        writer.write(EvaluationEvent(2.0, 1.0, 32, 0.0, math.inf, 0.1, None))
    first, second = read_event_file(tmp_path / "e.jsonl")
    assert first == step(1.0)
    assert isinstance(second, EvaluationEvent)
    assert math.isnan(second.loss)
    assert second.metric == 0.1
    assert second.divergence is None


def test_frequent_events_wait_for_company_and_rare_ones_do_not(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    writer = EventWriter(path, flush_every=3)
    writer.write(step(1.0))
    assert read_event_file(path) == []
    writer.write(LostEvent(2.0, 1, "gone"))
    assert len(read_event_file(path)) == 2
    for t in (3.0, 4.0, 5.0):
        writer.write(step(t))
    assert len(read_event_file(path)) == 5
    writer.close()
    writer.close()


@given(st.integers(min_value=0))
def test_cut_anywhere_every_whole_line_is_read(at: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "e.jsonl"
        with EventWriter(path) as writer:
            for event in EVENTS:
                writer.write(event)
        data = path.read_bytes()
        cut = data[: at % (len(data) + 1)]
        path.write_bytes(cut)
        events = read_event_file(path)
        assert events == EVENTS[: len(events)]
        assert len(events) >= cut.count(b"\n")
        with EventWriter(path) as writer:
            writer.write(LostEvent(9.0, 0, "again"))
        assert read_event_file(path)[-1] == LostEvent(9.0, 0, "again")


def test_a_broken_line_in_the_middle_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    path.write_bytes(
        b'{"type":"lost","seconds":1,"node":1,"reason":"x"}\n{"type":"st\n{"type":"lost","seconds":2,"node":1,"reason":"x"}\n'
    )
    with pytest.raises(ConfigurationError, match=r"line 2 of .*e\.jsonl is not an event"):
        read_event_file(path)


@pytest.mark.parametrize(
    "line",
    [
        b"[]",
        b"{}",
        b'{"type":"step"}',
        b'{"type":"step","seconds":null}',
        b'{"type":"lost","t":1,"node":1,"reason":""}',
    ],
)
def test_json_that_is_no_event_is_an_error(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "e.jsonl"
    path.write_bytes(line + b"\n")
    with pytest.raises(ConfigurationError, match=r"line 1 of .* is not an event: .* flockstep that wrote it"):
        read_event_file(path)


KILLED = """
import os, signal, sys
from flockstep.records import EventWriter
from flockstep.records.events import LostEvent
from flockstep.records.events import UpdateEvent
writer = EventWriter(sys.argv[1], flush_every=4)
for number in range(10):
    writer.write(UpdateEvent(float(number), 0, 1, 1, 0))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL here")
def test_sigkill_loses_only_what_was_held_back(tmp_path: Path) -> None:
    path = tmp_path / "events" / "worker-0.jsonl"
    done = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert [event.seconds for event in RunFolder(tmp_path).read_events() if isinstance(event, UpdateEvent)] == list(
        range(8)
    )


def test_the_nodes_files_are_read_as_one_and_merged_by_time(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    made(folder)
    assert folder.read_events() == []
    for node, times in ((0, (1.0, 4.0)), (1, (2.0, 3.0)), (-1, (2.5,)), (None, (5.0,))):
        with EventWriter(folder.node_events_file(node)) as writer:
            for t in times:
                writer.write(LostEvent(t, 9 if node is None else node, "x"))
    names = {path.name for path in (folder.path / "events").iterdir()}
    assert names == {"worker-0.jsonl", "worker-1.jsonl", "server-0.jsonl", "launcher.jsonl"}
    with folder.node_events_file(1).open("ab") as file:
        file.write(b'{"type":"lost","seconds":9')
    before = folder.read_events()
    assert [event.seconds for event in before if isinstance(event, LostEvent)] == [1.0, 2.0, 2.5, 3.0, 4.0, 5.0]
    assert folder.merge_events() == before
    assert not (folder.path / "events").exists()
    assert folder.read_events() == before
    assert folder.merge_events() == before


def made(folder: RunFolder, config: RunConfig = CONFIG, overwrite: bool = False) -> None:
    with folder.created(config, overwrite):
        pass


def finish(folder: RunFolder, config: RunConfig) -> None:
    made(folder, config)
    folder.write_summary(summarize(config, EVENTS, "finished"))


def test_a_finished_run_is_found_again(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    finish(folder, CONFIG)
    assert same_run(folder.read_config(), CONFIG)
    assert not folder.unfinished


def test_files_that_are_no_run_are_never_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(ConfigurationError, match="contains files but no run"):
        made(RunFolder(tmp_path))
    with pytest.raises(ConfigurationError, match="is a file"):
        made(RunFolder(tmp_path / "thesis.tex"))
    assert (tmp_path / "thesis.tex").read_text() == "mine"


def test_a_summary_survives_the_file(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    finish(folder, CONFIG)
    assert folder.read_summary() == summarize(CONFIG, EVENTS, "finished")
    folder.summary_file.write_text("{")
    with pytest.raises(ConfigurationError, match="delete this file"):
        folder.read_summary()


def test_without_a_summary_the_run_reads_as_interrupted(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    made(folder)
    with EventWriter(folder.node_events_file(0)) as writer:
        writer.write(EVENTS[3])
    record = folder.read()
    assert record.summary.status == "interrupted"
    assert record.summary.final_metric == 0.9
    assert record.events == [EVENTS[3]]


def test_the_result_survives_with_its_schema(tmp_path: Path) -> None:
    schema = Schema.of({"w": (2, 3), "b": ()})
    assert schema.size == 7  # also fills the cached properties, which must not reach the file
    assert schema.hash
    params = np.arange(7, dtype=np.float32)
    folder = RunFolder(tmp_path)
    folder.write_result(params, schema)
    back, table = folder.read_result()
    np.testing.assert_array_equal(back, params)
    assert back.dtype == np.float32
    assert table == schema
    assert folder.read_buffers() == {}
    folder.write_result(params, schema, {"mean": params[::2], "count": np.array(3)})
    buffers = folder.read_buffers()
    assert (buffers["mean"].tolist(), int(buffers["count"])) == ([0, 2, 4, 6], 3)
    (tmp_path / "buffers.safetensors").write_bytes(b"x")
    with pytest.raises(ConfigurationError, match=r"buffers\.safetensors is damaged: .*; repeat the run"):
        folder.read_buffers()
    assert table.hash == schema.hash


def test_a_result_that_does_not_fit_its_schema_is_refused(tmp_path: Path) -> None:
    schema = Schema.of({"w": (3,)})
    folder = RunFolder(tmp_path)
    with pytest.raises(ConfigurationError, match="contains no result"):
        folder.read_result()
    for wrong in (np.zeros(4, np.float32), np.zeros(3, np.float64)):
        with pytest.raises(SchemaMismatch, match="the schema says"):
            folder.write_result(wrong, schema)
    folder.write_result(np.zeros(3, np.float32), schema)
    np.save(tmp_path / "result.npy", np.zeros(5, np.float32))
    with pytest.raises(SchemaMismatch, match=r"has shape \(5,\) and dtype float32, but the schema says \(3,\)"):
        folder.read_result()
    np.save(tmp_path / "result.npy", np.array([print], dtype=object), allow_pickle=True)
    with pytest.raises(ConfigurationError, match=r"result\.npy is damaged: .*Python objects.*; repeat the run"):
        folder.read_result()
    with (tmp_path / "result.npy").open("wb") as file:  # numpy would divide by the size of an element
        np.lib.format.write_array_header_1_0(file, {"descr": "|V0", "fortran_order": False, "shape": (-1,)})
    with pytest.raises(ConfigurationError, match=r"result\.npy is damaged: .*elements without bytes; repeat the run"):
        folder.read_result()


@pytest.mark.parametrize("name", ["result.npy", "schema.json"])
@pytest.mark.parametrize("damage", [b"", b"\x93NUMPY", b"{", b'{"dtype": 1, "entries": 2}', b"\xff" * 200])
def test_a_damaged_result_is_an_error_that_names_the_file(name: str, damage: bytes, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write_result(np.zeros(3, np.float32), Schema.of({"w": (3,)}))
    (tmp_path / name).write_bytes(damage)
    with pytest.raises(ConfigurationError, match=name):
        folder.read_result()


def test_holding_back_nothing_is_the_least() -> None:
    with pytest.raises(ConfigurationError, match="flush_every must be >= 1, got 0"):
        EventWriter("never-opened", flush_every=0)
    assert not Path("never-opened").exists()


@pytest.mark.parametrize("name", ["config.toml", "summary.json", "events.jsonl"])
def test_bytes_that_are_no_text_are_an_error_that_names_the_file(name: str, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    made(folder)
    (folder.path / name).write_bytes(b'{"type":"scalar","name":"\xff\xfe"}\n{}\n')
    with pytest.raises(ConfigurationError, match=name):
        folder.read()


def test_a_figure_that_is_not_finite_does_not_spoil_the_record(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    made(folder)
    with EventWriter(folder.events_file) as events:
        for node, value in enumerate((2.0, math.nan, math.inf)):
            events.write(ScalarEvent(1.0, node, "alpha", value))
    folder.write_summary(summarize(CONFIG, folder.merge_events(), "failed"))
    assert folder.read().summary.scalars == {"alpha": 2.0}


@pytest.mark.parametrize(
    ("name", "value"), [("seed", -1), ("threads", 0), ("heartbeat", 0.5), ("heartbeat", math.inf), ("heartbeat", 1e9)]
)
def test_a_configuration_that_no_process_could_work_with(name: str, value: float) -> None:
    with pytest.raises(ConfigurationError, match=name):
        replace(CONFIG, **{name: value})
