import pytest

from flockstep.errors import ConfigurationError
from flockstep.simulation import units


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("100mbit", 12.5e6),
        ("1gbit", 125e6),
        ("10 Gbit/s", 1.25e9),
        ("2.5gbps", 312.5e6),
        ("8bit", 1.0),
        ("16 bps", 2.0),
        ("12.5MB/s", 12.5e6),
        ("3kB/s", 3e3),
        ("1MiB/s", 2.0**20),
        ("7B/s", 7.0),
        ("1e6", 1e6),
        (125e6, 125e6),
        (5, 5.0),
        (float("inf"), float("inf")),
    ],
)
def test_bandwidth_is_bytes_per_second(text: str | float, expected: float) -> None:
    assert units.bandwidth(text) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("50us", 5e-5), ("1ms", 1e-3), ("0.2 s", 0.2), ("5ns", 5e-9), ("2µs", 2e-6), ("1min", 60.0), ("3", 3.0), (0, 0.0)],
)
def test_duration_is_seconds(text: str | float, expected: float) -> None:
    assert units.duration(text) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    "value",
    [
        "",
        "fast",
        "1 bananas",
        "mbit",
        "-1mbit",
        "10mb/s",
        "10mB",
        "1gbit/h",
        "1xbit",
        "0gbit",
        0,
        -5,
        float("nan"),
        True,
    ],
)
def test_what_is_no_bandwidth_is_refused(value: str | float) -> None:
    with pytest.raises(ConfigurationError, match=r"backbone must be .* got .*; write '100mbit'"):
        units.bandwidth(value, "backbone")


@pytest.mark.parametrize(
    "value", ["", "soon", "5 h", "1gbit", "-1ms", "1 ms s", -1e-9, float("inf"), float("nan"), False]
)
def test_what_is_no_duration_is_refused(value: str | float) -> None:
    with pytest.raises(ConfigurationError, match=r"latency must be .* got .*; write '50us'"):
        units.duration(value, "latency")


@pytest.mark.parametrize("text", ["20", " 1e6 ", "0"])
def test_a_number_alone_is_refused_where_a_unit_is_needed(text: str) -> None:
    with pytest.raises(ConfigurationError, match=f"--bandwidth must have a unit, got {text!r}; write it like '1gbit'"):
        units.with_unit(text, "--bandwidth", "1gbit")
    assert units.with_unit(f"{text.strip()}ms", "--latency", "100us") == f"{text.strip()}ms"
