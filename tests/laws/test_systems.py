"""The systems of the survey: every derived cell against its table 1, and every mode at work."""

from __future__ import annotations

import dataclasses
import itertools
import json

import msgspec
import pytest

from flockstep import registry
from flockstep.cli.app import run as flockstep
from flockstep.errors import CompositionError, UnknownName
from flockstep.strategies.base import Strategy, TaxonomyEntry
from flockstep.strategies.parameter_server import ParameterServer
from flockstep.systems import catalog
from flockstep.systems.catalog import system, systems
from flockstep.testing.strategies import GradientSource, run_strategy
from flockstep_lab.claims.a22_taxonomy import Taxonomy
from flockstep_lab.claims.survey_table import COLUMNS, differences, table_1
from support.matrix import few

ELSEWHERE = {"DeepSpark", "Horovod", "Downpour", "Hogwild!"}
"""In the catalog, but not in the survey's table."""
MODES = [(known.name, mode.name) for known in systems() for mode in known.modes if mode.partition == "none"]


def test_every_row_of_the_table_and_four_more_are_there():
    assert len(table_1()) == 17
    assert {known.name for known in systems()} == {row.system for row in table_1()} | ELSEWHERE
    assert len(systems()) == 21


@pytest.mark.parametrize("printed", table_1(), ids=lambda row: row.system)
def test_each_derived_cell_is_the_printed_one(printed):
    assert differences(system(printed.system).row(), printed) == {}


@pytest.mark.full  # at every push: each cell below, the modes that do not split a model, and tests of each partition
def test_the_claim_about_the_table_holds_in_every_row():
    """Every mode of every system runs, those that split the model too, and all 17 rows are as printed."""
    verdict = Taxonomy().check(lambda line: None)
    assert verdict.holds
    assert {row.what: row.ours for row in verdict.rows} == {row.system: "as printed" for row in table_1()}


def test_the_claim_falls_short_without_the_modes_that_split_the_model(monkeypatch):
    """Negative control: the eight rows with MP take it from a partition and from nothing else."""
    from flockstep_lab.claims import a22_taxonomy

    def unsplit(name):
        known = system(name)
        return msgspec.structs.replace(known, modes=tuple(one for one in known.modes if one.partition == "none"))

    monkeypatch.setattr(a22_taxonomy, "system", unsplit)
    monkeypatch.setattr(a22_taxonomy, "_failed", lambda known: "")
    verdict = Taxonomy().check(lambda line: None)
    short = {row.what for row in verdict.rows if not row.holds}
    assert short == {printed.system for printed in table_1() if "MP" in printed.parallelism}
    assert len(short) == 8


def test_model_parallelism_follows_from_the_partition_of_a_mode():
    """Negative control: without the mode that splits the model, the row has no MP."""
    known = system("MXNet")
    assert known.parallelism == "DP, MP"
    unsplit = msgspec.structs.replace(known, modes=tuple(mode for mode in known.modes if mode.partition == "none"))
    assert unsplit.parallelism == "DP"
    with pytest.raises(CompositionError, match=r"a strategy and a partition; write --strategy 'scatter_reduce' --part"):
        known.expression("layers on devices")


def test_a_replica_alone_takes_its_cell_from_the_partition():
    """Without a strategy between replicas, what is not exchanged and how parts reach each other is the partition's."""
    alone = catalog.System("one", "", "", (catalog.Mode(partition="pipeline(2, gpipe, 1)"),))
    assert alone.row() == {
        "system": "one",
        "parallelism": "MP",
        "optimization": "central",
        "scheduling": "sync",
        "exchange": "none",
        "topology": "p2p mesh",
    }
    late = catalog.System("one", "", "", (catalog.Mode(partition="pipeline(2, pipedream, 1)"),))
    assert late.row()["scheduling"] == "async"
    with pytest.raises(CompositionError, match=r"write --strategy 'all_reduce' --partition 'pipeline\(2, gpipe, 1\)'"):
        alone.expression()


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("printed", table_1(), ids=lambda row: row.system)
def test_one_wrong_cell_is_noticed(printed, column):
    """Negative control: every cell of every row, exchanged for one of another row that differs."""
    derived = {c: str(getattr(printed, c)) for c in COLUMNS}
    options = itertools.product(*(part.split(" or ") for part in derived[column].split("; ")))
    admissible = {derived[column], *("; ".join(chosen) for chosen in options)}
    for other in {str(getattr(row, column)) for row in table_1()} - admissible:
        assert column in differences({**derived, column: other}, printed)
    assert column in differences({**derived, column: "something else"}, printed)


def test_a_strategy_that_states_another_cell_is_noticed(monkeypatch):
    """Negative control: the cell comes from the composition, not from the catalog."""
    printed = next(row for row in table_1() if row.system == "Petuum")
    assert differences(system("Petuum").row(), printed) == {}
    right = ParameterServer.taxonomy_entry.fget
    monkeypatch.setattr(
        ParameterServer, "taxonomy_entry", property(lambda self: dataclasses.replace(right(self), scheduling="async"))
    )
    assert differences(system("Petuum").row(), printed) == {"scheduling": ("async", "bounded async")}


def test_a_cell_follows_from_the_strategy_and_its_parts():
    cells = {
        "ps(bsp)": TaxonomyEntry("central", "sync", "reduce", "single PS"),
        "ps(bsp, shards=3)": TaxonomyEntry("central", "sync", "reduce", "distributed PS"),
        "ps(ssp(0))": TaxonomyEntry("central", "sync", "reduce", "single PS"),
        "ps(ssp(3))": TaxonomyEntry("central", "bounded async", "ad hoc", "single PS"),
        "ps(essp(3))": TaxonomyEntry("central", "bounded async", "ad hoc with eager scatter", "single PS"),
        "ps(asynchronous)": TaxonomyEntry("central", "async", "ad hoc", "single PS"),
        "ps(backup(1))": TaxonomyEntry("central", "sync", "reduce", "single PS"),
        "ps(k_sync(2))": TaxonomyEntry("central", "sync", "reduce", "single PS"),
        "ps(softsync(1))": TaxonomyEntry("central", "async", "ad hoc", "single PS"),
        "deepspark": TaxonomyEntry("decentral", "async", "ad hoc", "dedicated master"),
        "eamsgd": TaxonomyEntry("decentral", "async", "ad hoc", "dedicated master"),
        "easgd_sync": TaxonomyEntry("decentral", "sync", "reduce", "dedicated master"),
        "mpca": TaxonomyEntry("decentral", "soft-bounded async", "binomial tree", "dedicated master"),
        "tree_easgd": TaxonomyEntry("decentral", "bounded async", "ad hoc", "tree"),
    }
    assert {text: Strategy.parse(text).taxonomy_entry for text in cells} == cells


def test_every_strategy_has_a_place():
    cells = {name: registry.load("strategy", name)().taxonomy_entry for name in registry.names("strategy")}
    assert {name: cell for name, cell in cells.items() if not isinstance(cell, TaxonomyEntry)} == {}


@pytest.mark.parametrize(("name", "mode"), few(MODES, *dict(MODES).items()))
def test_every_mode_of_every_system_runs_and_learns(name, mode):
    """The worked example of each system, on four workers in virtual time."""
    run = run_strategy(f"{name}: {mode}" if mode else name, 4, 200)
    engine = GradientSource().engine
    before, after = engine.evaluate(engine.initial()), evaluated(engine, run.result)
    assert after.loss < 0.8 * before.loss


def evaluated(engine, result):
    """The test loss of a model, or of an ensemble."""
    return engine.evaluate(result) if result.ndim == 1 else engine.evaluate_together(result, range(len(result)))


def test_names_are_forgiving_and_modes_have_names():
    assert str(Strategy.parse("bigdl")) == str(Strategy.parse("BigDL"))
    assert str(Strategy.parse("D-PSGD")) == str(Strategy.parse("dpsgd"))
    assert str(Strategy.parse("mxnet: dist_async")) == str(Strategy.parse("slice_servers"))
    assert str(Strategy.parse("Hogwild!")) == str(Strategy.parse("hogwild"))
    with pytest.raises(UnknownName, match="did you mean 'dist_async'"):
        Strategy.parse("MXNet: dist_asink")
    with pytest.raises(UnknownName, match="did you mean 'Petuum'"):
        Strategy.parse("Petum")
    with pytest.raises(CompositionError, match=r"write --strategy 'all_reduce' --partition 'grid\(2, 2\)'"):
        Strategy.parse("COTS HPC")


def test_every_composition_is_written_as_one_would_write_it():
    for known in catalog.systems():
        for mode in known.modes:
            strategy = Strategy.parse(mode.runs)
            assert Strategy.parse(str(strategy)) == strategy
        assert known.citation
        assert known.algorithm.endswith(".")


def test_the_command_lists_them_and_tells_of_one(capsys):
    assert flockstep(["systems", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) >= 21
    assert {tuple(row) for row in rows} == {("system", *COLUMNS)}
    assert flockstep(["systems", "petuum", "--json"]) == 0
    one = json.loads(capsys.readouterr().out)
    assert one["system"] == "Petuum"
    assert "essp(s=3)" in one["modes"][0]["strategy"]
    assert flockstep(["systems"]) == 0
    assert "SparkNet" in capsys.readouterr().out
    assert flockstep(["systems", "Petuum"]) == 0
    assert "flockstep simulate digits -s 'Petuum' -n 4" in capsys.readouterr().out
    assert flockstep(["systems", "Petum"]) == 2
    assert "did you mean 'Petuum'?" in capsys.readouterr().err
