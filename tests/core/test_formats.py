"""Formats: constants and rounding (docs/spec.md, section 1)."""

from __future__ import annotations

import math
import struct
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyamp import FORMATS, Format, PolicyError

FLOAT16 = FORMATS["float16"]
BFLOAT16 = FORMATS["bfloat16"]
FLOAT32 = FORMATS["float32"]
E4M3 = FORMATS["float8_e4m3fn"]
E5M2 = FORMATS["float8_e5m2"]

formats = st.sampled_from(list(FORMATS.values()))
reals = st.floats(allow_nan=False)


@pytest.mark.parametrize(
    ("fmt", "value", "expected"),
    [
        (FLOAT16, 1e-8, 0.0),
        (FLOAT16, 1024 * 1e-8, 1.0251998901367188e-05),
        (FLOAT16, 1024 * 1e-8, 172 * 2.0**-24),
        (FLOAT16, 65519.99, 65504.0),
        (FLOAT16, 65520.0, math.inf),
        (FLOAT16, -65520.0, -math.inf),
        (FLOAT16, 1 + 2.0**-11, 1.0),
        (FLOAT16, 1 + 3 * 2.0**-11, 1 + 2.0**-9),
        (FLOAT16, 2.0**-25, 0.0),
        (FLOAT16, math.nextafter(2.0**-25, 1), 2.0**-24),
        (BFLOAT16, 1 + 2.0**-8, 1.0),
        (BFLOAT16, 1.0 + 0.003, 1.0),
        (BFLOAT16, 3.4e38, math.inf),
        (BFLOAT16, 3.39e38, 3.3895313892515355e38),
        (FLOAT32, 1.0251998901367188e-05 / 1024, 1.0011717677116394e-08),
        (FLOAT32, 1e39, math.inf),
        (FLOAT32, 1e-46, 0.0),
        (E4M3, 464.0, 448.0),
        (E5M2, 61439.0, 57344.0),
        (E5M2, 61440.0, math.inf),
    ],
)
def test_scalar_vectors(fmt: Format, value: float, expected: float) -> None:
    assert fmt.round(value) == expected


@pytest.mark.parametrize("value", [464.1, -464.1, 1e300, math.inf, -math.inf])
def test_a_format_without_infinities_overflows_to_nan(value: float) -> None:
    assert math.isnan(E4M3.round(value))


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_largest_float64_overflows_like_any_other(fmt: Format, sign: float) -> None:
    result = fmt.round(sign * 1.7976931348623157e308)
    assert result == sign * math.inf if fmt.has_inf else math.isnan(result)


@pytest.mark.parametrize(
    ("name", "bits", "max_", "smallest_normal", "smallest_subnormal", "eps", "threshold"),
    [
        ("float32", 32, (2 - 2.0**-23) * 2.0**127, 2.0**-126, 2.0**-149, 2.0**-23, (2 - 2.0**-24) * 2.0**127),
        ("float16", 16, 65504.0, 2.0**-14, 2.0**-24, 2.0**-10, 65520.0),
        ("bfloat16", 16, (2 - 2.0**-7) * 2.0**127, 2.0**-126, 2.0**-133, 2.0**-7, (2 - 2.0**-8) * 2.0**127),
        ("float8_e4m3fn", 8, 448.0, 2.0**-6, 2.0**-9, 2.0**-3, 464.0),
        ("float8_e5m2", 8, 57344.0, 2.0**-14, 2.0**-16, 2.0**-2, 61440.0),
    ],
)
def test_constants(name: str, bits: int, max_: float, smallest_normal: float, smallest_subnormal: float, eps: float, threshold: float) -> None:
    fmt = FORMATS[name]
    assert (fmt.name, fmt.bits, fmt.max) == (name, bits, max_)
    assert (fmt.smallest_normal, fmt.smallest_subnormal, fmt.eps, fmt.overflow_threshold) == (smallest_normal, smallest_subnormal, eps, threshold)


def test_every_float16_value_is_a_fixed_point() -> None:
    for pattern in range(2**16):
        (value,) = struct.unpack("<e", struct.pack("<H", pattern))
        rounded = FLOAT16.round(value)
        assert (math.isnan(value) and math.isnan(rounded)) or struct.pack("<e", rounded) == struct.pack("<H", pattern)


def test_between_neighbouring_float16_values_rounding_is_to_nearest_even() -> None:
    values = [struct.unpack("<e", struct.pack("<H", pattern))[0] for pattern in range(0x7C00)]
    for index, (low, high) in enumerate(pairwise(values)):
        middle = (low + high) / 2  # exact: 12 bits
        assert FLOAT16.round(math.nextafter(middle, 0)) == low
        assert FLOAT16.round(middle) == (low if index % 2 == 0 else high)
        assert FLOAT16.round(math.nextafter(middle, math.inf)) == high


@given(st.floats(min_value=-65519.99, max_value=65519.99))
def test_float16_agrees_with_the_standard_library(value: float) -> None:
    assert struct.pack("<d", FLOAT16.round(value)) == struct.pack("<d", struct.unpack("<e", struct.pack("<e", value))[0])


@given(st.floats(min_value=-3.4e38, max_value=3.4e38))
def test_float32_agrees_with_the_standard_library(value: float) -> None:
    assert struct.pack("<d", FLOAT32.round(value)) == struct.pack("<d", struct.unpack("<f", struct.pack("<f", value))[0])


@given(formats, reals)
def test_rounding_is_idempotent(fmt: Format, value: float) -> None:
    once = fmt.round(value)
    assert fmt.round(once) == once or (math.isnan(once) and math.isnan(fmt.round(once)))


@given(st.sampled_from([f for f in FORMATS.values() if f.has_inf]), reals, reals)
def test_rounding_is_monotone(fmt: Format, a: float, b: float) -> None:
    low, high = sorted((a, b))
    assert fmt.round(low) <= fmt.round(high)


@given(formats, reals)
def test_rounding_is_symmetric_and_keeps_the_sign_of_zero(fmt: Format, value: float) -> None:
    positive, negative = fmt.round(value), fmt.round(-value)
    if math.isnan(positive):
        assert math.isnan(negative)
    else:
        assert positive == -negative
        assert math.copysign(1, positive) == math.copysign(1, value)


@given(formats, reals)
def test_the_error_of_rounding_is_half_a_unit_at_most(fmt: Format, value: float) -> None:
    if abs(value) <= fmt.max:
        unit = max(math.ldexp(fmt.eps, math.frexp(value)[1] - 1), fmt.smallest_subnormal)
        assert abs(fmt.round(value) - value) <= unit / 2


def test_nan_stays_nan() -> None:
    assert all(math.isnan(fmt.round(math.nan)) for fmt in FORMATS.values())


@pytest.mark.parametrize(
    ("given_", "name"),
    [
        ("f16", "float16"),
        ("fp16", "float16"),
        ("float16", "float16"),
        ("torch.bfloat16", "bfloat16"),
        (" BF16 ", "bfloat16"),
        ("f32", "float32"),
        ("e4m3", "float8_e4m3fn"),
        ("e5m2", "float8_e5m2"),
        (FLOAT16, "float16"),
        (type("dtype", (), {"name": "float16"})(), "float16"),
        (type("float16", (), {}), "float16"),
        (type("dtype", (), {"__str__": lambda self: "torch.float32"})(), "float32"),
    ],
)
def test_a_format_is_found_by_name_or_dtype_object(given_: object, name: str) -> None:
    assert Format.of(given_) is FORMATS[name]


@pytest.mark.parametrize("given_", ["half", "float64", "int8", "", None, 16])
def test_an_unknown_dtype_is_an_error_that_lists_the_known_ones(given_: object) -> None:
    with pytest.raises(PolicyError) as caught:
        Format.of(given_)
    assert all(name in str(caught.value) for name in FORMATS)
    assert isinstance(caught.value, ValueError)


def test_a_format_prints_as_its_name() -> None:
    assert [str(fmt) for fmt in FORMATS.values()] == list(FORMATS)
