"""`flockstep.shard`: what each worker takes of a loader, and what of the loader stays as the user wrote it."""

from __future__ import annotations

import os
import random
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
    random_split,
)
from torch.utils.data.distributed import DistributedSampler

import flockstep
from flockstep.errors import ConfigurationError, MissingDependency
from flockstep.launchers.comparisons import Comparisons
from flockstep.messages import Message
from flockstep.runtime import epochs
from flockstep.runtime.member import NodeSpec
from flockstep.runtime.node_spec import NODE_SPEC, spec_to_text
from flockstep.runtime.torch_data import identity, sampled, split

WORKERS = 3


class Numbers(Dataset[int]):
    """0 .. count-1, each loaded once it is asked for."""

    def __init__(self, count: int = 20):
        self.count = count
        self.asked: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        self.asked.append(index)
        return index


class Stream(IterableDataset[int]):
    """0 .. count-1 in order, or shuffled by torch's generator; loader workers take turns."""

    def __init__(self, count: int = 20, shuffled: bool = False):
        self.count = count
        self.shuffled = shuffled

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        order = torch.randperm(self.count).tolist() if self.shuffled else list(range(self.count))
        yield from order[info.id :: info.num_workers] if info is not None else order


class Doubling(DataLoader[int]):
    """A user's own loader."""

    def __iter__(self) -> Any:
        return (2 * batch for batch in super().__iter__())


@pytest.fixture
def as_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[int], None]:
    """Each rank counts its loaders and their epochs by itself, as in a process of its own."""
    counters: dict[int, tuple[Any, dict[Any, Any]]] = {}

    def become(rank: int, workers: int = WORKERS) -> None:
        places, counts = counters.setdefault(rank, (weakref.WeakKeyDictionary(), {}))
        monkeypatch.setattr(epochs, "_places", places)
        monkeypatch.setattr(epochs, "_counts", counts)
        node_spec = NodeSpec(
            "run", rank, "ipc://control", str(tmp_path), "ipc", 5.0, str(tmp_path), workers, os.getpid()
        )
        monkeypatch.setenv(NODE_SPEC, spec_to_text(NodeSpec(**{**vars(node_spec), "process": os.getpid()})))

    return become


Become = Callable[[int], None]
Batches = list[list[int]]


def listed(batches: Iterable[Any]) -> Batches:
    return [torch.as_tensor(batch).tolist() for batch in batches]


def flat(nested: Any) -> list[int]:
    return [one for inner in nested for one in flat(inner)] if isinstance(nested, list) else [nested]


def parts(loader: Callable[[], Iterable[Any]], as_rank: Become) -> list[Batches]:
    """What each worker takes of its own loader in the first epoch; each seeds torch by its rank."""
    found = []
    for rank in range(WORKERS):
        as_rank(rank)
        torch.manual_seed(1337 + rank)
        found.append(listed(flockstep.shard(loader())))
    return found


def each_nth(batches: Batches) -> list[Batches]:
    """The rule: worker i takes batches i, i + n, …; what is left over at the end is dropped."""
    turns = len(batches) // WORKERS
    return [[batches[WORKERS * turn + rank] for turn in range(turns)] for rank in range(WORKERS)]


@pytest.mark.filterwarnings("ignore:flockstep.shard leaves out")
@pytest.mark.parametrize("loading", [0, 2])
def test_a_stream_is_split_by_batches(loading: int, as_rank: Become) -> None:
    def loader() -> DataLoader[int]:
        return DataLoader(Stream(), batch_size=2, num_workers=loading)

    assert parts(loader, as_rank) == each_nth(listed(loader()))


@pytest.mark.filterwarnings("ignore:flockstep.shard leaves out")
@pytest.mark.parametrize("loading", [0, 2])
def test_a_shuffled_stream_is_split_without_overlap_and_anew_each_epoch(loading: int, as_rank: Become) -> None:
    loaders = [DataLoader(Stream(18, shuffled=True), batch_size=2, num_workers=loading) for _ in range(WORKERS)]
    found = []
    for _ in range(2):
        taken = []
        for rank, loader in enumerate(loaders):
            as_rank(rank)
            taken.append(listed(flockstep.shard(loader)))
        assert [len(one) for one in taken] == [3, 3, 3]
        if loading == 0:  # otherwise loader workers shuffle apart from each other
            assert sorted(flat(taken)) == list(range(18))
        found.append(taken)
    assert found[0] != found[1]


@pytest.mark.filterwarnings("ignore:flockstep.shard leaves out")
@pytest.mark.parametrize("shuffled", [False, True])
def test_a_batch_sampler_is_split_by_batches_and_others_samples_are_not_loaded(shuffled: bool, as_rank: Become) -> None:
    data = [Numbers() for _ in range(WORKERS)]
    made = iter(data)

    def loader() -> DataLoader[int]:
        one = next(made)
        return DataLoader(
            one, batch_sampler=BatchSampler((RandomSampler if shuffled else SequentialSampler)(one), 2, True)
        )

    found = parts(loader, as_rank)
    assert [len(one) for one in found] == [3, 3, 3]
    everything = flat(found)
    assert len(set(everything)) == 18
    assert (everything != sorted(everything)) or not shuffled
    for rank in range(WORKERS):
        assert sorted(data[rank].asked) == sorted(flat(found[rank]))
    if not shuffled:
        assert found == each_nth([[i, i + 1] for i in range(0, 20, 2)])


@pytest.mark.parametrize("options", [{}, {"drop_last": True}, {"batch_size": None}], ids=str)
def test_samples_are_split_as_distributed_data_parallel_splits_them(options: dict[str, Any], as_rank: Become) -> None:
    """As many batches on every worker; without drop_last some samples are drawn twice to that end."""
    data = Numbers(20)
    found = parts(lambda: DataLoader(data, **{"batch_size": 3, "shuffle": True} | options), as_rank)
    assert len({len(one) for one in found}) == 1
    assert len({len(flat(one)) for one in found}) == 1
    assert len(set(flat(found))) == (18 if "drop_last" in options else 20)


def test_each_epoch_is_shuffled_anew_and_the_same_on_all_workers(as_rank: Become) -> None:
    loaders = [DataLoader(Numbers(18), batch_size=2, shuffle=True) for _ in range(WORKERS)]
    found = []
    for _ in range(2):
        taken = []
        for rank, loader in enumerate(loaders):
            as_rank(rank)
            taken.append(listed(flockstep.shard(loader)))
        assert sorted(flat(taken)) == list(range(18))
        found.append(taken)
    assert found[0] != found[1]


def seen_by(worker: int) -> None:
    torch.set_num_threads(1)
    info = get_worker_info()
    assert info is not None
    info.dataset.count = 6  # type: ignore[attr-defined] # what only this function does


KEPT: dict[str, Any] = {
    "batch_size": 2,
    "num_workers": 1,
    "persistent_workers": True,
    "prefetch_factor": 5,
    "timeout": 50.0,
    "worker_init_fn": seen_by,
    "generator": torch.Generator(),
    "collate_fn": torch.tensor,
}


@pytest.mark.parametrize("data", [Numbers(6), Stream(30)], ids=lambda data: type(data).__name__)
def test_the_loader_stays_as_the_user_wrote_it(data: Any, as_rank: Become) -> None:
    as_rank(1)
    loader = DataLoader(data, **KEPT, multiprocessing_context="fork", pin_memory=True)
    mine: Any = flockstep.shard(loader)
    for name in (*KEPT, "dataset", "multiprocessing_context", "pin_memory", "drop_last"):
        assert getattr(mine, name) == getattr(loader, name), name
    assert mine.dataset is data
    assert hasattr(mine, "sampler")
    assert not hasattr(mine, "no_such_thing")


def test_worker_init_fn_is_called_and_persistent_workers_persist(as_rank: Become) -> None:
    as_rank(0)
    loader = DataLoader(Stream(30), **KEPT)
    assert listed(flockstep.shard(loader)) == [[0, 1]]
    mine: Any = flockstep.shard(loader)
    before = mine._iterator._workers[0].pid
    assert listed(mine) == [[0, 1]]
    assert mine._iterator._workers[0].pid == before


@pytest.mark.parametrize("kind", ["samples", "batches", "stream"])
def test_epochs_go_on_where_a_checkpoint_was_written(kind: str, as_rank: Become) -> None:
    def loader() -> DataLoader[int]:
        if kind == "stream":
            return DataLoader(Stream(shuffled=True), batch_size=2)
        if kind == "batches":
            data = Numbers()
            return DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 2, False))
        return DataLoader(Numbers(), batch_size=2, shuffle=True)

    def passes(count: int, *first: int) -> list[Batches]:
        one = loader()
        part = flockstep.shard(one, *first)
        return [[batch.tolist() for batch in part] for _ in range(count)]

    as_rank(1)
    whole = passes(4)
    assert whole[0] != whole[2]
    assert passes(2, 2) == whole[2:]
    assert passes(2, 0) == whole[:2]
    same = loader()
    assert [[b.tolist() for b in flockstep.shard(same, epoch=number)] for number in (3, 0)] == [whole[3], whole[0]]
    with pytest.raises(ConfigurationError, match="epoch must be >= 0, got -1"):
        flockstep.shard(same, epoch=-1)


def test_a_loader_of_ones_own_stays_of_its_class(as_rank: Become) -> None:
    for rank in range(WORKERS):
        as_rank(rank)
        mine = flockstep.shard(Doubling(Numbers(6), batch_size=2))
        assert isinstance(mine, Doubling)
        assert listed(mine) == [[2 * rank, 2 * rank + 6]]


def test_batches_that_are_left_out_are_told_of_once(as_rank: Become) -> None:
    told = []
    for rank, batches in [(0, 4), (1, 4), (0, 6)]:
        as_rank(rank)
        mine = flockstep.shard(range(batches))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert [len(list(mine)) for _ in range(2)] == [batches // WORKERS] * 2
        told.append([str(one.message) for one in caught])
    assert [len(one) for one in told] == [1, 0, 0]
    assert told[0][0].startswith("flockstep.shard leaves out the last 1 batches of an epoch because all 3")


def test_lengths(as_rank: Become) -> None:
    as_rank(2)
    data = Numbers(20)
    sampler = BatchSampler(SequentialSampler(data), 2, False)
    for loader, batches in [
        (DataLoader(data, batch_size=2), 4),
        (DataLoader(data, batch_sampler=sampler), 3),
        ([1, 2, 3, 4], 1),
    ]:
        mine: Any = flockstep.shard(loader)
        assert len(mine) == batches == len(list(mine))
        if isinstance(loader, DataLoader):
            assert len(mine.dataset) == 20
            assert len(mine.sampler) == (7 if loader.batch_sampler is not sampler else 20)
    with pytest.raises(TypeError, match="has no len"):
        len(flockstep.shard(DataLoader(Stream())))  # type: ignore[arg-type]


SAMPLERS: list[Callable[[Any], Any]] = [
    lambda data: WeightedRandomSampler([1.0] * 10 + [0.0] * 10, 18),
    lambda data: RandomSampler(data, replacement=True, num_samples=18),
    lambda data: SubsetRandomSampler(range(2, 20)),
]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_of_a_custom_sampler_each_worker_takes_every_nth_index(sampler: Any, as_rank: Become) -> None:
    data = Numbers()
    found = parts(lambda: DataLoader(data, batch_size=2, sampler=sampler(data)), as_rank)
    torch.manual_seed(epochs.EpochCount(identity(data)).seed)  # of the first epoch of the first loader of these data
    order = list(sampler(data))
    assert [flat(one) for one in found] == [order[rank::WORKERS] for rank in range(WORKERS)]


def test_seeds_made_from_a_date_are_seeds_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epochs, "seed_of_script", lambda: 20261128000000)
    found = {epochs.EpochCount("data", place).seed for place in range(3)}
    assert len(found) == 3
    for seed in found:
        torch.Generator().manual_seed(seed + 1000)  # of a later epoch


def test_a_loader_that_one_worker_alone_makes_leaves_the_parts_disjoint(as_rank: Become) -> None:
    """For other data, or in a reference cycle that only the other workers have freed."""
    found = []
    for rank in range(WORKERS):
        as_rank(rank)
        if rank == 0:
            other = flockstep.shard(DataLoader(Numbers(8), batch_size=2))
            cycle = [DataLoader(Numbers(30), batch_size=1, shuffle=True)]
            cycle.append(cycle)  # type: ignore[arg-type]
            flockstep.shard(cycle[0])
            del cycle
        found += [int(one) for one in flockstep.shard(DataLoader(Numbers(30), batch_size=1, shuffle=True))]
    assert sorted(found) == list(range(30))
    assert len(list(other)) == 2


@pytest.mark.parametrize("batches", [False, True])
def test_a_sampler_that_divides_by_itself_is_refused(batches: bool, as_rank: Become) -> None:
    as_rank(0)
    data = Numbers()
    sampler = DistributedSampler(data, 3, 0)
    loader = DataLoader(data, batch_sampler=BatchSampler(sampler, 2, False)) if batches else None
    with pytest.raises(ConfigurationError, match="DistributedSampler divides the samples among workers already"):
        flockstep.shard(loader or DataLoader(data, sampler=sampler))


def test_loaders_read_side_by_side_have_orders_of_their_own_unless_a_seed_says_otherwise(as_rank: Become) -> None:
    """Equal on all workers; `seed` is that of a `DistributedSampler`."""

    def pairs(*seeds: int | None) -> list[list[tuple[int, int]]]:
        found = []
        for rank in range(WORKERS):
            as_rank(rank)
            both = [DataLoader(Numbers(30), batch_size=1, shuffle=True) for _ in range(2)]
            one, other = (flockstep.shard(each, 0, seed=seed) for each, seed in zip(both, seeds, strict=True))
            found.append([(int(a), int(b)) for a, b in zip(one, other, strict=True)])
        for place in range(2):
            assert sorted(pair[place] for each in found for pair in each) == list(range(30))
        return found

    assert sum(a == b for each in pairs(None, None) for a, b in each) < 6
    found = pairs(5, 5)
    assert all(a == b for each in found for a, b in each)
    sampler = DistributedSampler(Numbers(30), WORKERS, 1, seed=5)
    assert [a for a, _ in found[1]] == list(sampler)


def test_runs_with_different_seeds_draw_different_orders(as_rank: Become, monkeypatch: pytest.MonkeyPatch) -> None:
    def order(seed: int, rank: int) -> list[int]:
        as_rank(rank)
        monkeypatch.setattr(epochs, "seed_of_script", lambda: seed)
        return flat(listed(flockstep.shard(DataLoader(Numbers(30), batch_size=1, shuffle=True), 0)))

    first, second = ([order(seed, rank) for rank in range(WORKERS)] for seed in (0, 1))
    assert sorted(flat(first)) == sorted(flat(second)) == list(range(30))
    assert first[0] != second[0]
    assert order(0, 0) == first[0]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Steps of this process's run, of which the test counts the only element up."""
    taken = [0]
    monkeypatch.setattr(epochs, "steps_here", lambda: taken[0])
    return taken


def looks(part: Any, where: str) -> list[Any]:
    """What one rank alone does with its part, which others do not do; iterators that it keeps."""
    if where.startswith("peek"):
        kept = iter(part)
        next(kept)
        return [kept] if where == "peek, kept" else []
    return list(part) if where == "pass" else []


@pytest.mark.parametrize("kind", ["samples", "stream"])
@pytest.mark.parametrize(
    ("look", "read_first"),
    [("peek", False), ("peek, kept", False), ("pass", False), ("peek", True), ("peek, kept", True)],
)
def test_a_rank_may_look_at_its_part_alone(
    look: str, read_first: bool, kind: str, as_rank: Become, steps: list[int]
) -> None:
    """Before the first epoch, in the middle of one, and between two, also if a script reads all batches first."""

    def trained(where: str) -> list[Batches]:
        steps[0] = 0
        as_rank(1)
        data: Any = Numbers(36) if kind == "samples" else Stream(36, shuffled=True)
        part = flockstep.shard(DataLoader(data, batch_size=2, shuffle=kind == "samples" or None), 0)
        kept, found = looks(part, where), []
        for _ in range(3):
            found.append([])
            for number, batch in enumerate(list(part) if read_first else part):
                found[-1].append(batch.tolist())
                steps[0] += 1
                kept += looks(part, where if number == 2 else "")
            kept += looks(part, where)
        return found

    right = trained("")
    assert len({str(one) for one in right}) == 3, "each epoch has its own order"
    assert trained(look) == right


def test_a_loader_that_is_made_anew_goes_on_with_the_next_epoch(as_rank: Become) -> None:
    as_rank(1)
    orders = [listed(flockstep.shard(DataLoader(Numbers(18), batch_size=2, shuffle=True))) for _ in range(2)]
    same = DataLoader(Numbers(18), batch_size=2, shuffle=True)
    assert orders[0] != orders[1]
    assert [listed(flockstep.shard(same, epoch)) for epoch in range(2)] == orders


def test_what_has_no_batches_gets_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NODE_SPEC, raising=False)
    with pytest.raises(ConfigurationError, match=r"shard needs batches, such as a DataLoader, .*, got 5; pass what"):
        flockstep.shard(5)  # type: ignore[arg-type]


def told_of(*data: Any) -> str:
    """What the run says of the data sets of its workers: as an error, or empty if it accepts them."""
    try:
        digests = Comparisons(len(data), lambda: None)
        for rank, each in enumerate(data):
            for what, digest, certain in (("data", identity(each), 1), ("samples", sampled(each), 0)):
                digests.hear(Message(rank, "data", note={"of": what, "digest": digest, "certain": certain, "step": 0}))
    except ConfigurationError as error:
        return str(error)
    return "warned" if digests._said else ""


class Augmented(Numbers):
    """Adds random numbers to its samples, from the global streams or its own."""

    def __init__(self, rank: int, own: bool = False):
        super().__init__()
        self.own = np.random.default_rng(rank) if own else None

    def __getitem__(self, index: int) -> Any:
        return index + (torch.rand(1).item() + random.random() if self.own is None else self.own.random())


def test_data_sets_that_differ_between_ranks_are_told_apart() -> None:
    """By their sizes, indices and values, of which random augmentation of a rank is no part."""
    whole = TensorDataset(torch.arange(40.0))
    splits = [random_split(whole, [30, 10], torch.Generator().manual_seed(seed))[0] for seed in (0, 1, 0)]
    by_rank = [Subset(whole, range(rank, 40, 2)) for rank in range(2)]
    assert "workers 0 and 1 hold different data, got 30 samples (digest " in told_of(*splits)
    assert told_of(splits[0], splits[2]) == ""
    assert "got 20 samples (digest " in told_of(*by_rank)
    assert "got 20 samples" in told_of(Numbers(20), Numbers(21))
    assert "hold different data" in told_of(whole, TensorDataset(torch.arange(40.0) + 1))
    before = torch.get_rng_state()
    one = sampled(Augmented(0))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert one == sampled(Augmented(1)) != ""
    assert told_of(Augmented(0, own=True), Augmented(1, own=True)) == ""
    assert told_of([1.0, 2.0], [1.0, 3.0]) == "warned"


def test_alone_it_is_the_loader_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NODE_SPEC, raising=False)
    loader = DataLoader(Stream())
    assert flockstep.shard(loader) is loader


@pytest.mark.parametrize("data", [Numbers(6), Stream(6)], ids=lambda data: type(data).__name__)
def test_a_loader_that_was_used_before_is_split_too(data: Any, as_rank: Become) -> None:
    """Its persistent workers go on with what they were started for, so the part gets workers of its own."""
    as_rank(1)
    loader = DataLoader(data, batch_size=2, num_workers=1, persistent_workers=True)
    assert len(listed(loader)) == 3
    assert len(listed(flockstep.shard(loader))) == 1
    assert len(listed(loader)) == 3


@pytest.fixture
def in_a_child(monkeypatch: pytest.MonkeyPatch, as_rank: Become) -> None:
    """This process was started by the script of worker 1, and has its environment."""
    as_rank(1)
    process = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: process + 1)


def distribute() -> None:
    model = torch.nn.Linear(2, 2)
    flockstep.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), "all_reduce")


@pytest.mark.parametrize(
    ("name", "call"),
    [("shard", lambda: flockstep.shard([1, 2, 3])), ("distribute", distribute), ("join", flockstep.join)],
)
def test_a_process_that_a_script_started_takes_no_part_alone(name: str, call: Any, in_a_child: None) -> None:
    with pytest.raises(ConfigurationError, match=rf"started by the script of worker 1.*flockstep\.{name} .*unset"):
        call()
    assert (flockstep.rank(), flockstep.workers()) == (1, WORKERS)


class Sharing(Dataset[int]):
    """The processes that load it import the script anew, where they are not forked."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        return index

    def __setstate__(self, state: dict[str, Any]) -> None:
        assert list(flockstep.shard([1, 2, 3]))


def test_loader_workers_may_import_a_script_that_shards(as_rank: Become) -> None:
    as_rank(0)
    loader = DataLoader(Sharing(), num_workers=1, multiprocessing_context="spawn")
    assert listed(loader) == [[0], [1]]


@pytest.fixture
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(vars(flockstep), "clip_grad_norm_", raising=False)  # kept since it was first looked up
    for name in [name for name in sys.modules if name.startswith("flockstep.runtime.torch_")]:
        monkeypatch.delitem(sys.modules, name)


def test_without_torch_what_needs_none_is_split(no_torch: None, as_rank: Become) -> None:
    as_rank(1)
    assert list(flockstep.shard([1, 2, 3, 4, 5])) == [2]


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("clip_grad_norm_", lambda: flockstep.clip_grad_norm_([], 1.0)),
        ("distribute", lambda: flockstep.distribute(None, None, "all_reduce")),  # type: ignore[arg-type]
    ],
)
def test_without_torch_the_way_to_install_it_is_named(
    name: str, call: Any, no_torch: None, as_rank: Become, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor of a launched script hears of it too."""
    as_rank(1)
    told: list[Any] = []
    monkeypatch.setattr("flockstep.runtime.node_spec.send_to_control", lambda node_spec, words: told.append(words))
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with pytest.raises(MissingDependency, match=rf"flockstep\.{name} needs PyTorch.*flockstep\[torch\]") as raised:
        call()
    assert [words.reason for words in told] == ([str(raised.value)] if name == "distribute" else [])


@pytest.mark.parametrize("kind", ["samples", "batches", "stream", "sampler", "list"])
def test_private_data_are_all_used_in_an_order_of_epoch_and_rank(kind: str, as_rank: Become) -> None:
    """Of any kind, in the sizes that the worker has; a custom sampler is the worker's own matter."""

    def loader() -> Iterable[Any]:
        data = Numbers(7)
        return {
            "samples": lambda: DataLoader(data, batch_size=2, shuffle=True),
            "batches": lambda: DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 2, False)),
            "stream": lambda: DataLoader(Stream(7, shuffled=True), batch_size=2),
            "sampler": lambda: DataLoader(data, batch_size=2, sampler=WeightedRandomSampler([1.0] * 7, 7, False)),
            "list": lambda: [[0, 1], [2, 3], [4, 5], [6]],
        }[kind]()

    orders: dict[tuple[int, int], Batches] = {}
    for rank in (0, 2):
        as_rank(rank)
        one = loader()
        for epoch in range(2):
            orders[rank, epoch] = listed(flockstep.shard(one, private=True))
        assert listed(flockstep.shard(loader(), epoch=1, private=True, seed=0)) == orders[rank, 1]
    assert all(sorted(flat(order)) == list(range(7)) for order in orders.values())
    if kind != "list":
        assert orders[0, 0] != orders[0, 1]
        assert orders[0, 0] != orders[2, 0]
    if kind not in ("stream", "list"):
        assert len(flockstep.shard(one, private=True)) == 4  # type: ignore[arg-type]
    if kind != "list":
        assert flockstep.shard(one, private=True).dataset is one.dataset  # type: ignore[attr-defined]


def test_a_worker_without_data_of_its_own_is_told(as_rank: Become) -> None:
    as_rank(1)
    once = flockstep.shard((number for number in range(3)), private=True)
    assert list(once) == [0, 1, 2]
    with pytest.raises(ConfigurationError, match=r"worker 1 has no batch in epoch 1; .* a generator is empty"):
        list(once)


@pytest.mark.parametrize("samples", [20, 2])
def test_parts_smaller_than_a_batch_that_is_dropped_are_refused(samples: int, as_rank: Become) -> None:
    as_rank(1)
    size = 8 if samples == 20 else 1
    with pytest.raises(
        ConfigurationError, match=rf"each of 3 workers gets only {samples // 3} of the {samples} samples"
    ):
        flockstep.shard(DataLoader(Numbers(samples), batch_size=size, drop_last=True))
    assert len(listed(flockstep.shard(DataLoader(Numbers(samples), batch_size=size)))) == 1
    larger = DataLoader(Numbers(samples), batch_size=samples + 1, drop_last=True)
    assert listed(flockstep.shard(larger)) == listed(larger) == []


@pytest.mark.parametrize("rank", [0, 2])
def test_fewer_batches_than_workers_are_refused_on_every_worker(rank: int, as_rank: Become) -> None:
    as_rank(rank)
    with pytest.raises(
        ConfigurationError,
        match=r"each of 3 workers the same number of batches, but the epoch has only 2; use at most 2 workers",
    ):
        list(flockstep.shard(DataLoader(Stream(4), batch_size=2)))
    assert list(flockstep.shard([])) == []


class Shuffled:
    """A user's own iterable, shuffled by torch's generator."""

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(12).tolist()


def test_the_epochs_of_an_iterable_are_counted_across_calls(as_rank: Become) -> None:
    as_rank(1)
    data = Shuffled()
    found = [list(flockstep.shard(data)) for _ in range(3)]
    assert found[0] != found[1] != found[2]
    assert list(flockstep.shard(data, epoch=1)) == found[1]
    data = Shuffled()
    assert [list(flockstep.shard(data, epoch, seed=0)) for epoch in range(3)] == found


class Repeated(Stream):
    """Each loading process reads everything, which torch does not notice."""

    def __iter__(self) -> Iterator[int]:
        yield from range(self.count)


@pytest.mark.parametrize(("data", "rank", "loading", "told"), [
    (Repeated(12), 0, 2, True), (Repeated(12), 1, 2, False), (Repeated(12), 0, 1, False), (Stream(12), 0, 2, False),
])  # fmt: skip
def test_loading_processes_that_read_the_same_are_told_of(
    data: Stream, rank: int, loading: int, told: bool, as_rank: Become
) -> None:
    as_rank(rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        list(flockstep.shard(DataLoader(data, batch_size=2, num_workers=loading)))
    assert [
        str(one.message) for one in caught if "the 2 processes of the loader read the same batches" in str(one.message)
    ] == ([str(caught[0].message)] if told else [])


def used_by(workers: int, epoch: int, first: int = 0, last: int = 1000) -> list[int]:
    """The samples of an epoch that all workers use in the batches from `first` to `last`, counted over all workers."""
    samples = []
    for rank in range(workers):
        part = split(DataLoader(Numbers(101), batch_size=4, shuffle=True), rank, workers)
        epochs.epochs_of(part).seed = 0
        epochs.epochs_of(part).go_on(epoch)
        samples += [x for batch, xs in enumerate(part) if first <= batch * workers < last for x in xs.tolist()]
    return samples


@pytest.mark.parametrize("now", [1, 3, 4])
def test_an_epoch_goes_on_with_another_number_of_workers(now: int) -> None:
    """By the count of docs/how-to/resume.md: none is used twice, and less than one batch of each worker is left out."""
    for used in range(0, 24, 2):
        before, after = used_by(2, 5, last=used), used_by(now, 5, first=used)
        assert len(before) == 4 * used
        assert len(set(before) & set(after)) < now, "the sampler's own padding"
        left = set(range(101)) - {*before, *after}
        assert len(left) <= 4 * (now - 1)
