"""Why a record is not taken: the reasons that holders and readers give each other."""

from __future__ import annotations

from enum import IntEnum

from swarm.errors import RecordRefusedError


class Refusal(IntEnum):
    """Why a record was not taken; travels in store answers (all but the last, which only a reader meets)."""

    NONE = 0
    MALFORMED = 1
    TOO_LARGE = 2
    BAD_SIGNATURE = 3
    FOREIGN = 4
    """Signed for another run."""
    OUTDATED = 5
    """A newer version is known: a replay, or an author that lost its memory."""
    EXPIRED = 6
    QUOTA = 7
    FUTURE = 8
    """Of a format that newer software writes."""
    SCHEMA = 9
    """The key belongs to a namespace of ours, and the body is not what is kept there."""
    UNSIGNED = 10
    MISPLACED = 11
    """Of another key than the one asked for."""

    @property
    def reason(self) -> str:
        return self.name.lower()


def refused(refusal: Refusal, message: str, fix: str | None = None, record_version: int = 0) -> RecordRefusedError:
    """The error for a refusal."""
    return RecordRefusedError(message, fix=fix, reason=refusal.reason, record_version=record_version)
