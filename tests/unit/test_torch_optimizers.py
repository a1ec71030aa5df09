"""torch's optimizers as ours: the same rule, or a refusal."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from flockstep.errors import ConfigurationError  # noqa: E402
from flockstep.frameworks.torch_optimizers import from_torch  # noqa: E402
from flockstep.optimizers.adagrad import Adagrad  # noqa: E402
from flockstep.optimizers.adam import Adam, AdamW  # noqa: E402
from flockstep.optimizers.sgd import SGD  # noqa: E402

WEIGHTS = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (torch.optim.SGD(WEIGHTS, lr=0.1), SGD(lr=0.1)),
        (
            torch.optim.SGD(WEIGHTS, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True, foreach=True),
            SGD(lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
        ),
        (torch.optim.SGD(WEIGHTS, lr=0.1, momentum=0.9, dampening=0.5), SGD(lr=0.1, momentum=0.9, dampening=0.5)),
        (torch.optim.Adam(WEIGHTS, betas=(0.8, 0.9), eps=1e-6), Adam(beta1=0.8, beta2=0.9, eps=1e-6)),
        (torch.optim.Adam(WEIGHTS, lr=torch.tensor(0.5), foreach=False), Adam(lr=0.5)),
        (torch.optim.AdamW(WEIGHTS, weight_decay=0.2), AdamW(weight_decay=0.2)),
        (torch.optim.AdamW(WEIGHTS), AdamW()),
        (torch.optim.Adagrad(WEIGHTS, lr_decay=0.1, eps=1e-3), Adagrad(lr_decay=0.1, eps=1e-3)),
        (torch.optim.Adagrad(WEIGHTS, initial_accumulator_value=0.5), Adagrad(initial_accumulator_value=0.5)),
        (torch.optim.SGD([{"params": [w]} for w in WEIGHTS], lr=0.1), SGD(lr=0.1)),
        (torch.optim.SGD([{"params": WEIGHTS, "mine": lambda t: t}], lr=np.float32(0.5)), SGD(lr=0.5)),
        (torch.optim.SGD([{"params": [w], "name": i} for i, w in enumerate(WEIGHTS)], lr=0.1), SGD(lr=0.1)),
    ],
)
def test_torchs_optimizers_are_translated(theirs: Any, ours: Any) -> None:
    assert from_torch(theirs) == ours
    assert type(from_torch(theirs)) is type(ours)


def test_a_scheduled_learning_rate_is_the_one_of_now() -> None:
    optimizer = torch.optim.SGD(WEIGHTS, lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5)
    assert from_torch(optimizer) == SGD(lr=0.05)


def later_torch() -> Any:
    """An optimizer of torch with a setting that a later version might have."""
    optimizer = torch.optim.SGD(WEIGHTS, lr=0.1)
    optimizer.defaults["cosine"] = optimizer.param_groups[0]["cosine"] = 3
    return optimizer


class Own(torch.optim.SGD):
    """A user's own optimizer."""


@pytest.mark.parametrize(
    ("theirs", "sentence"),
    [
        (
            torch.optim.RMSprop(WEIGHTS),
            "must be one of torch.optim's SGD, Adam, AdamW, Adagrad, got RMSprop; choose one",
        ),
        (Own(WEIGHTS, lr=0.1), "got Own"),
        (torch.optim.Adam(WEIGHTS, amsgrad=True), "amsgrad of Adam must be False, got True; leave it out"),
        (torch.optim.SGD(WEIGHTS, lr=0.1, maximize=True), "maximize of SGD must be False, got True"),
        (
            torch.optim.SGD([{"params": [WEIGHTS[0]], "lr": 0.5}, {"params": [WEIGHTS[1]]}], lr=0.1),
            "all param groups of SGD must have the same lr, got 0.5 in group 0 and 0.1 in group 1; pass all",
        ),
        (later_torch(), "SGD has the setting cosine=3, which flockstep does not"),
    ],
)
def test_what_has_no_counterpart_is_refused(theirs: Any, sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        from_torch(theirs)
