"""What a record may say: plain values as msgpack, which may come from anybody and cost next to nothing to refuse."""

from __future__ import annotations

from typing import Any

import msgpack

from swarm.dht.refusals import Refusal, refused

MAX_NESTING = 32
"""Levels of lists and tables in a body."""
_OPENING = bytes([*range(0x80, 0xA0), *range(0xDC, 0xE0)])
_EXTENSIONS = bytes([0xC1, *range(0xC7, 0xCA), *range(0xD4, 0xD9)])
_PLAIN = bytes(code for code in range(256) if code not in _EXTENSIONS)
_FIXED = {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
"""Bytes that follow the code of a number."""
_COUNTED = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4, 0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}
"""Bytes of the length that follows the code of raw bytes, a text, a list, a table."""


def encode_body(body: Any) -> bytes:
    """Body to msgpack. Raises `RecordRefusedError` for values that msgpack has no form for, or that nest too deep."""
    try:
        encoded = bytes(msgpack.packb(body))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise refused(
            Refusal.MALFORMED, f"The body cannot be written as msgpack: {error}.", "Use plain values."
        ) from error
    decode_body(encoded)
    return encoded


def decode_body(body: bytes) -> Any:
    """Msgpack to plain values. Raises `RecordRefusedError`; anything may be in there.

    Lists and tables nest at most `MAX_NESTING` deep and never claim more items than there are bytes: a claim is
    allocated before its items are read, so that a few bytes could otherwise ask for megabytes.
    """
    try:
        # Cheap for almost all bodies: so few bytes that could open a level cannot nest any deeper.
        if len(body) - len(body.translate(None, _OPENING)) > MAX_NESTING or body.translate(None, _PLAIN):
            _scan(body)
        return msgpack.unpackb(body, strict_map_key=False)
    except (ValueError, TypeError, OverflowError, RecursionError, IndexError, msgpack.UnpackException) as error:
        raise refused(Refusal.MALFORMED, f"The body of a record is no msgpack of plain values: {error}.") from error


def _scan(body: bytes) -> None:
    """Walk over msgpack without building anything. Raises `ValueError` or `IndexError`."""
    at, end = 0, len(body)
    open_items = [1]  # items still to come, by level
    owed = 1  # in all levels
    while open_items:
        if not open_items[-1]:
            open_items.pop()
            continue
        code = body[at]
        at += 1
        open_items[-1] -= 1
        owed -= 1
        items = -1
        if code <= 0x7F or code >= 0xE0 or code in (0xC0, 0xC2, 0xC3):
            continue
        if code <= 0x8F:
            items = 2 * (code & 0x0F)
        elif code <= 0x9F:
            items = code & 0x0F
        elif code <= 0xBF:
            at += code & 0x1F
        elif code in _FIXED:
            at += _FIXED[code]
        elif code in _COUNTED:
            width = _COUNTED[code]
            count = int.from_bytes(body[at : at + width], "big")
            at += width
            if code <= 0xDB:
                at += count
            else:
                items = 2 * count if code >= 0xDE else count
        else:
            raise ValueError(f"an extension type, or no code of msgpack: {code:#x}")
        if at > end:
            raise ValueError("it ends too early")
        if items >= 0:
            owed += items
            open_items.append(items)
            if owed > end - at or len(open_items) > MAX_NESTING + 1:
                raise ValueError(f"more items than bytes, or more than {MAX_NESTING} levels")
