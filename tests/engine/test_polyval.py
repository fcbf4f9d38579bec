"""The hash: every kernel this CPU offers against the examples of RFC 8452 and against the field's
definition. Knows POLYVAL and nothing else.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fastckpt import _engine

KERNELS = _engine.polyval_kernels()
NOISE = random.Random(1).randbytes(1 << 17)
POLYNOMIAL = 1 << 128 | 1 << 127 | 1 << 126 | 1 << 121 | 1
keys = st.binary(min_size=16, max_size=16)


def dot(a: int, b: int) -> int:
    """The RFC's a * b * x^-128, bit by bit."""
    product = 0
    for i in range(128):
        if a >> i & 1:
            product ^= b << i
    for _ in range(128):
        product = (product ^ POLYNOMIAL if product & 1 else product) >> 1
    return product


def polyval(data: bytes, key: bytes) -> bytes:
    state, factor = 0, int.from_bytes(key, "little")
    for at in range(0, len(data), 16):
        state = dot(state ^ int.from_bytes(data[at : at + 16], "little"), factor)
    return state.to_bytes(16, "little")


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_examples_of_the_rfc(kernel: str) -> None:
    """Appendix A, and dot() of section 7."""
    key = bytes.fromhex("25629347589242761d31f826ba4b757b")
    words = "4f4f95668c83dfb6401762bb2d01a262d1a24ddd2721d006bbe45f20d3c9f362"
    wanted = "f7a3b47b846119fae5b7866cf5e5b77e"
    assert KERNELS[kernel](bytes.fromhex(words), key).hex() == wanted
    one, other = "66e94bd4ef8a2c3b884cfa59ca342b2e", "ff000000000000000000000000000000"
    product = KERNELS[kernel](bytes.fromhex(one), bytes.fromhex(other))
    assert product.hex() == "ebe563401e7e91ea3ad6426b8140c394"


@pytest.mark.parametrize("kernel", KERNELS)
@settings(deadline=None)
@given(keys, st.integers(0, 60), st.integers(0, 1500))
@example(b"\xff" * 16, 0, 1024)
@example(bytes(16), 0, 512)
def test_kernel_equals_the_definition(kernel: str, key: bytes, start: int, nbytes: int) -> None:
    piece = NOISE[start : start + nbytes]
    assert KERNELS[kernel](piece, key) == polyval(piece, key)


@pytest.mark.parametrize("kernel", KERNELS)
@given(keys, st.integers(0, 60), st.integers(0, 70_000))
def test_kernels_equal_each_other(kernel: str, key: bytes, start: int, nbytes: int) -> None:
    piece = NOISE[start : start + nbytes]
    assert KERNELS[kernel](piece, key) == KERNELS["portable"](piece, key)


@pytest.mark.parametrize("kernel", KERNELS)
@given(keys, st.integers(0, 4000), st.integers(0, 2000))
def test_a_hash_goes_on_behind_whole_words(
    kernel: str, key: bytes, words: int, nbytes: int
) -> None:
    whole = NOISE[: 16 * words + nbytes]
    state = KERNELS[kernel](whole[: 16 * words], key)
    assert KERNELS[kernel](whole[16 * words :], key, state) == KERNELS[kernel](whole, key)


def test_a_key_or_a_state_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="5 bytes instead of 16"):
        KERNELS["portable"](b"a", b"short")
    with pytest.raises(ValueError, match="5 bytes instead of 16"):
        KERNELS["portable"](b"a", bytes(16), b"short")
