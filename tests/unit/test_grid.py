"""The borders of layers with local connections on a grid of machines; claim A26 counts their connections one by one."""

from __future__ import annotations

import pytest

from flockstep.errors import ConfigurationError
from flockstep_lab.claims.local_layers import LocalLayer


def test_two_machines_side_by_side_fetch_the_border_of_a_window() -> None:
    """Of 10 columns 5 each; 8 columns of outputs, 4 each, of which the left reads columns 0 to 5, the right 4 to 9."""
    assert LocalLayer(10, 10, 2, 3).fetched(1, 2) == [1 * 10 * 2, 1 * 10 * 2]
    assert LocalLayer(10, 10, 2, 1).fetched(2, 2) == [0] * 4, "nothing crosses a border"
    assert LocalLayer(4, 4, 1, 2, 2).fetched(2, 2) == [0] * 4
    assert LocalLayer(4, 4, 1, 4).fetched(1, 1) == [0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((8, 8, 0, 3), "channels of a layer must be >= 1, got 0"),
        ((8, 4, 1, 5), "window of a layer must be at most the 8 x 4 inputs, got 5"),
    ],
)
def test_what_is_refused(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        LocalLayer(*arguments)
    with pytest.raises(ConfigurationError, match="6 x 6 outputs of a layer cannot be divided into 7 x 1 rectangles"):
        LocalLayer(8, 8, 1, 3).fetched(7, 1)
