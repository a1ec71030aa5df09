"""Pipeline parallelism: consecutive layers on consecutive workers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from flockstep.codecs.base import Codec
from flockstep.codecs.identity import Identity
from flockstep.errors import ConfigurationError, require
from flockstep.expression import SHOWN
from flockstep.partitions.base import Addressing, Division, Partition
from flockstep.partitions.pipeline_schedules import OneForwardOneBackward, PipelineSchedule


def check_microbatches(microbatches: int, samples: int) -> None:
    """Raise `ConfigurationError` unless a batch has a sample for each micro-batch."""
    rule = f"at most the {samples} samples of a batch"
    require(microbatches <= samples, "microbatches", rule, microbatches, "use a larger batch or fewer micro-batches")


@dataclass(frozen=True)
class Pipeline(Partition):
    """A model cut into `stages` stages of consecutive layers, one worker for each stage; the stages compute
    micro-batches one after another.

    Each batch is divided into `microbatches` micro-batches, whose sizes differ by at most one sample. `schedule` is the
    order in which a stage computes its passes (Huang et al. 2019; Narayanan et al. 2019).
    """

    divides: ClassVar[Division] = "layers"
    part_noun: ClassVar[str] = "stage"
    addressing: ClassVar[Addressing] = "p2p mesh"

    stages: int
    schedule: PipelineSchedule = field(default=OneForwardOneBackward(), metadata=SHOWN)
    microbatches: int = field(default=1, metadata=SHOWN)
    split_at: tuple[int | str, ...] = ()
    """Names of the layers at which later chunks begin; empty for the cut whose slowest chunk has least work."""
    codec: Codec = Identity()
    """Codec for the activations and gradients of activations that stages send to each other."""
    differences: bool = False
    """Whether the codec encodes the change of a sample's activations since the previous epoch (AQ-SGD, Wang et al.
    2022). Both ends of a link then store the activations of every sample of their replica.
    """

    def __post_init__(self) -> None:
        for name, value in (("stages", self.stages), ("microbatches", self.microbatches)):
            require(value >= 1, f"{name} of pipeline", ">= 1", value, "use for example 4")
        self.schedule.check(self.stages, self.microbatches)
        if self.differences and (self.codec.lossless or not self.codec.contraction):
            raise ConfigurationError(
                f"differences of pipeline need a lossy codec that is a contraction, got {self.codec}; use for example "
                "codec=int8"
            )

    @property
    def parts(self) -> int:
        return self.stages

    def batches_held(self, part: int) -> float:
        """Return the number of batches whose activations a stage stores: the micro-batches in flight, divided by the M
        micro-batches of a batch. GPipe has all M in flight, 1F1B min(K - s, M) at stage s of K.
        """
        return self.schedule.in_flight(part, self.stages, self.microbatches) / self.microbatches

    def copies(self, part: int) -> int:
        """Return the number of versions of the weights that passes in progress use."""
        return self.schedule.versions(part, self.stages)

    @property
    def notes(self) -> list[str]:
        if self.microbatches > 1 or self.stages == 1 or not self.schedule.synchronous:
            return super().notes
        said = (
            f"Only one of the {self.stages} stages computes most of the time, because every batch is one micro-batch; "
            "to let stages compute at the same time, set microbatches, for example to four times the stages."
        )
        return [said]

    @property
    def remembers(self) -> bool:
        return self.differences

    @property
    def mean_delay(self) -> float:
        return sum(self.schedule.delay(stage, self.stages) for stage in range(self.stages)) / self.stages

    @property
    def delays(self) -> str | None:
        delays = [self.schedule.delay(stage, self.stages) for stage in range(self.stages)]
        if not any(delays):
            return None
        each = ", ".join(map(str, delays))
        return (
            f"Stages 0 to {self.stages - 1} compute gradients with weights that are {each} updates old "
            f"({self.schedule}), in addition to the staleness of the strategy."
        )
