import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmrouter_lib.api import quantity_bytes


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("1", 1),
        ("20Mi", 20 * 2**20),
        ("8Gi", 8 * 2**30),
        ("1.5Ki", 1536),
        ("2k", 2000),
        ("3M", 3_000_000),
        ("1e3", 1000),
        ("1.5E3", 1500),
        ("2E", 2 * 10**18),
        ("1Ei", 2**60),
        ("500m", 1),
        ("1500m", 2),
    ],
)
def test_a_quantity_is_read_as_kubernetes_reads_it(text: str, value: int) -> None:
    assert quantity_bytes(text) == value


@pytest.mark.parametrize(
    "text", ["", "Mi", "-1", "+1", "1 Mi", "1mi", "1KI", "1.", ".5", "1e", "1e99", "9999999999Ei", "1_0", "٣"]
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="quantity"):
        quantity_bytes(text)


@given(st.integers(0, 2**20), st.sampled_from([("", 1), ("Ki", 2**10), ("M", 10**6), ("Gi", 2**30)]))
def test_units_multiply(number: int, unit: tuple[str, int]) -> None:
    assert quantity_bytes(f"{number}{unit[0]}") == number * unit[1]
