"""flockstep for Transformers: a `Trainer` whose optimizer is coordinated by a strategy of flockstep."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from flockstep.errors import MissingDependency

try:
    import transformers
except ModuleNotFoundError as error:
    raise MissingDependency.of(str(error.name), "transformers", "flockstep.transformers") from error

from flockstep.accelerate import FlockstepAccelerator, open_group
from flockstep.runtime.node_spec import strategy_of_run
from flockstep.runtime.torch_parts import meet
from flockstep.strategies.base import Strategy

if TYPE_CHECKING:
    from flockstep.runtime.torch_buffers import Policy

__all__ = ["FlockstepMixin", "FlockstepTrainer", "open_group"]


class FlockstepMixin:
    """Mixin that lets a strategy of flockstep coordinate a `Trainer`: `class Mine(FlockstepMixin, Seq2SeqTrainer)`.

    Call `open_group()` before the script makes its `TrainingArguments`. Evaluations and checkpoints use the common
    model. Each call of `train` is one run, after which every rank holds the result.
    """

    accelerator: Any
    args: Any
    optimizer: Any

    def __init__(
        self, *args: Any, strategy: str | Strategy, buffers: Policy = "mean", timeout: float = 600.0, **options: Any
    ):
        """Make the `Trainer`.

        Args:
            args: as in `Trainer`.
            strategy: an expression such as "local_sgd(period=32)", or a strategy object.
            buffers: as in `flockstep.distribute`.
            timeout: as in `flockstep.distribute`.
            options: as in `Trainer`, which refuses others.

        Raises:
            ConfigurationError: the strategy is none.
        """
        self._coordination = strategy_of_run(strategy), buffers, timeout
        super().__init__(*args, **options)
        in_step = self._coordination[0].traits.delivery == "synchronous"
        if self.args.world_size > 1 and self.args.average_tokens_across_devices and not in_step:
            warnings.warn(
                "average_tokens_across_devices=True makes all ranks wait for each other in every step if the loss "
                f"is a mean over tokens, got the strategy {self._coordination[0]}, under which ranks need not wait; "
                "pass average_tokens_across_devices=False",
                UserWarning,
                stacklevel=2,
            )

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator, which lets the strategy coordinate the optimizers that the accelerator prepares."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        self.accelerator.__class__ = FlockstepAccelerator  # as the Trainer has configured it, with other methods
        self.accelerator.coordinate(*self._coordination)

    def train(self, *args: Any, **options: Any) -> Any:
        """Train the model in one run of flockstep, and end the run."""
        result = super().train(*args, **options)  # type: ignore[misc]
        self._finish()
        return result

    def _finish(self) -> None:
        self.accelerator.finish()
        self.optimizer = self.accelerator.plain(self.optimizer)  # for another call of train

    def evaluation_loop(self, *args: Any, **options: Any) -> Any:
        """Evaluate the common model of all workers instead of this worker's replica."""
        with self.accelerator.consensus():
            return super().evaluation_loop(*args, **options)  # type: ignore[misc]

    def save_model(self, *args: Any, **options: Any) -> None:
        """Save the common model; every rank must call this method."""
        with self.accelerator.consensus():
            super().save_model(*args, **options)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        if checkpoint is not None:
            self.accelerator.sync()

    def _load_best_model(self) -> None:
        self._finish()  # its parameters are not the run's result
        super()._load_best_model()  # type: ignore[misc]

    def _maybe_log_save_evaluate(self, *args: Any, **options: Any) -> None:
        if self.control.should_log:  # type: ignore[attr-defined]
            meet("Trainer")  # before the losses of all ranks are gathered
        super()._maybe_log_save_evaluate(*args, **options)  # type: ignore[misc]


class FlockstepTrainer(FlockstepMixin, transformers.Trainer):  # type: ignore[misc]
    """The `Trainer` of Transformers with a strategy of flockstep: `FlockstepTrainer(model, args, …, strategy="…")`."""
