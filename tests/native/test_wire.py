"""The wire format, written a second time from docs/wire.md, beside the data plane's own bytes."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradlane._native import crc32c, encode_header

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "wire.json").read_text())


def crc(data: bytes) -> int:
    """CRC32C by its definition, a bit at a time."""
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    return value ^ 0xFFFFFFFF


def header(type, flags, tensor, offset, length, iteration, priority, sender, payload_crc):
    fields = (0x4C47, 1, type, tensor, offset, length, iteration, priority, sender, flags, payload_crc)
    head = struct.pack("<HBBIQIIIHHI", *fields)
    return head + struct.pack("<I", crc(head))


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_headers(name):
    fields, expected = GOLDEN[name]["fields"], bytes.fromhex(GOLDEN[name]["bytes"])
    assert header(**fields) == expected
    assert encode_header(**fields) == expected


@given(
    type=st.integers(1, 12),
    flags=st.integers(0, 2**16 - 1),
    tensor=st.integers(0, 2**32 - 1),
    offset=st.integers(0, 2**64 - 1),
    length=st.integers(0, 2**32 - 1),
    iteration=st.integers(0, 2**32 - 1),
    priority=st.integers(0, 2**32 - 1),
    sender=st.integers(0, 2**16 - 1),
    payload_crc=st.integers(0, 2**32 - 1),
)
def test_any_header_is_that_of_the_document(**fields):
    assert encode_header(**fields) == header(**fields)


@given(data=st.binary(max_size=300))
def test_the_checksum_is_crc32c(data):
    assert crc32c(data) == crc(data)
