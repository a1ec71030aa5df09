"""Synchronous strategies keep what they promise with every kind of codec and feedback."""

from __future__ import annotations

import pytest

from flockstep.errors import CompositionError
from flockstep.strategies.base import Strategy
from flockstep.testing.strategies import check_strategy


@pytest.mark.parametrize("feedback", ["none", "residual", "momentum(m=0.5)"])
@pytest.mark.parametrize(
    "codec",
    ["bfloat16", "int8", "one_bit", "sign", "qsgd", "natural", "topk(0.2)", "random_k(0.2)", "threshold(0.01)",
     "dgc(0.2)", "adacomp(4)", "by_size(topk(0.2), limit=4)", "topk(0.4) + int8", "powersgd(1)", "dct(2, 4)"],
)  # fmt: skip
@pytest.mark.parametrize("strategy", ["all_reduce", "ps(bsp, shards=2", "scatter_reduce", "two_way"])
def test_synchronous_strategies_conform_with_codecs(strategy, codec, feedback):
    opened = strategy if "(" in strategy else f"{strategy}("
    text = f"{opened}{', ' if '(' in strategy else ''}codec={codec}, feedback={feedback})"
    if strategy == "two_way" and feedback.startswith("momentum"):
        with pytest.raises(CompositionError, match="twice"):
            Strategy.parse(text)
        return
    check_strategy(Strategy.parse(text), workers=(3,), alone_is_plain=False)
