"""Writes a replica from a script's checkpoint in the layout of `torch.distributed.checkpoint`."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from flockstep.arrays.namespace import as_tensor
from flockstep.errors import ConfigurationError
from flockstep.frameworks.job import import_components
from flockstep.frameworks.shard_layout import Box
from flockstep.records.checkpoints import Checkpoint, newest
from flockstep.records.folder import RunFolder
from flockstep.runtime.cut import Cut, read_cut
from flockstep.runtime.torch_keeper import OptimizerContent
from flockstep.strategies.base import Strategy

Key = tuple[str, ...]


def export_checkpoint(run: Path | str, folder: Path | str, replica: int = 0) -> None:
    """Write a replica from a script's newest checkpoint to a folder that `torch.distributed.checkpoint` reads.

    The folder holds `{"model": {name: tensor}, "optimizer": {"state": {name: {…}}}}` with the names that
    `torch.distributed.checkpoint.state_dict.get_state_dict` gives. Each shard is stored as its process held it, and can
    be loaded into any sharding. The model lacks frozen parameters; a tied parameter has its first name. The state of
    the optimizer is there if workers step, and without settings such as the learning rate. One process's state is in
    memory at a time.

    Args:
        run: folder of the run's record.
        folder: folder to write; must not exist.
        replica: number of the replica, from 0.

    Raises:
        ConfigurationError: the run has no complete checkpoint of a PyTorch script, or no such replica, or the folder
            exists.
    """
    record = RunFolder(Path(run))
    import_components(record.read_config().imports)
    checkpoint = newest(record.path)
    Strategy.parse(checkpoint.manifest.strategy)  # defines the classes of the saved states
    replicas = sorted({rank // checkpoint.manifest.replica_size for rank in checkpoint.manifest.steps})
    if replica not in replicas:
        raise ConfigurationError(
            f"replica must be one of {', '.join(map(str, replicas))}, which {checkpoint.folder} holds, got {replica}"
        )
    if Path(folder).exists():
        raise ConfigurationError(f"{folder} exists; choose another folder")
    planner = _ShardPlanner(checkpoint, replica)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as intended, in one process
        save({}, storage_writer=FileSystemWriter(folder), planner=planner, no_dist=True)


class _ShardPlanner(DefaultSavePlanner):
    """Plans to store all shards of a replica, and reads them one process at a time."""

    def __init__(self, checkpoint: Checkpoint, replica: int):
        super().__init__()
        self._checkpoint = checkpoint
        self._places: dict[tuple[str, tuple[int, ...]], tuple[int, Key]] = {}
        """Name and offsets of each shard → the node that held the shard, and its key in the node's state."""
        self._loaded = -1, dict[Key, tuple[torch.Tensor, Box]]()
        size = checkpoint.manifest.replica_size
        self._plan = self._planned(range(replica * size, (replica + 1) * size))

    def create_local_plan(self) -> SavePlan:
        """Return what is to be written."""
        self.mappings, self.plan = self._plan.planner_data, self._plan
        return self.plan

    def _planned(self, nodes: Iterable[int]) -> SavePlan:
        """Plan to write a shard of each tensor from each process that held one."""
        items, keys = list[WriteItem](), dict[str, Key]()
        for node in nodes:
            for key, (value, box) in self._held(node).items():
                name, offsets = ".".join(key), torch.Size(box.offsets)
                if (name, offsets) in self._places or (value.numel() == 0 and 0 not in box.whole):
                    continue
                self._places[name, offsets], keys[name] = (node, key), key
                chunk = ChunkStorageMetadata(offsets, value.shape)
                data = TensorWriteData(chunk, TensorProperties(value.dtype), torch.Size(box.whole))
                items.append(WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data))
        return SavePlan(items, planner_data=keys)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        """Return the values of a shard."""
        assert write_item.index.offset is not None
        node, key = self._places[write_item.index.fqn, write_item.index.offset]
        return self._held(node)[key][0]

    def _held(self, node: int) -> dict[Key, tuple[torch.Tensor, Box]]:
        """Return the tensors of a process, by key, and the place of each in the whole tensor."""
        if self._loaded[0] != node:
            cut = read_cut(self._checkpoint, node)
            if not isinstance(cut.at_boundary, OptimizerContent) or cut.at_boundary.layout is None:
                raise ConfigurationError(
                    f"{self._checkpoint.folder} does not hold the shards of a PyTorch script; repeat the run with this "
                    "version of flockstep"
                )
            self._loaded = node, dict(_tensors(cut))
        return self._loaded[1]


def _tensors(cut: Cut) -> Iterator[tuple[Key, tuple[torch.Tensor, Box]]]:
    """Yield the parameters, buffers and optimizer states of a process."""
    content = cut.at_boundary
    layout, values = content.layout, as_tensor(cut.params)
    boxes = dict(zip((entry.name for entry in layout.schema.entries), layout.boxes, strict=True))
    for name, value in layout.schema.views(values).items():
        yield ("model", name), (value, boxes[name])
    for name, value in cut.script["between_steps"].buffers.items():
        yield ("model", name), (value, _whole(value))
    for index, state in zip(layout.order, content.states, strict=False):
        entry = layout.schema.entries[index]
        for name, value in state.items() if index >= 0 else ():
            if isinstance(value, torch.Tensor):
                place = boxes[entry.name] if tuple(value.shape) == entry.shape else _whole(value)
                yield ("optimizer", "state", entry.name, name), (value, place)


def _whole(value: Any) -> Box:
    return Box(tuple(value.shape), (0,) * value.ndim)
