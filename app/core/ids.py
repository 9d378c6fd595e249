"""UUIDv7 identifiers, made by the service: they hold their creation time.

One index on (team, id) serves every list, and `created_at` needs no column.
"""

import os
import time
from datetime import UTC, datetime
from uuid import UUID

_RANDOM_BITS = 74
_COUNTER_STEP_BITS = 32
# A clock that goes back by less is being adjusted; by more, it was wrong before, or is now.
_LARGEST_STEP_BACK = 60_000 << _RANDOM_BITS  # milliseconds

# Bounds of a page that begins, or ends, with the list.
LOWEST_ID, HIGHEST_ID = UUID(int=0), UUID(int=2**128 - 1)

_last: int = 0


def new_id() -> UUID:
    """Make a UUIDv7 that is larger than all earlier ones of this process.

    The 74 random bits are a counter within one millisecond (RFC 9562, section 6.2, method 2): seeded
    at each new millisecond, otherwise raised by a random step, so the ids stay unguessable. If the
    host's clock goes back by more than a minute, the ids follow it: otherwise all ids of a day would
    have the time of a clock that was a day ahead for a moment.
    """
    global _last
    stamp = (time.time_ns() // 1_000_000) << _RANDOM_BITS
    entropy = int.from_bytes(os.urandom(10), "big")
    if stamp > _last or _last - stamp > _LARGEST_STEP_BACK:
        # The top random bit starts at zero so that the counter cannot overflow in its millisecond.
        _last = stamp | (entropy >> 7)
    else:
        _last += 1 + (entropy & ((1 << _COUNTER_STEP_BITS) - 1))
    milliseconds, random = divmod(_last, 1 << _RANDOM_BITS)
    high, low = divmod(random, 1 << 62)
    return UUID(int=milliseconds << 80 | 0x7 << 76 | high << 64 | 0b10 << 62 | low)


def seconds_since(made: UUID) -> float:
    return max(0.0, time.time() - unix_seconds(made))


def unix_seconds(identifier: UUID) -> float:
    """The Unix time inside a UUIDv7, to the millisecond."""
    return (identifier.int >> 80) / 1000


def created_at(identifier: UUID) -> datetime:
    return datetime.fromtimestamp(unix_seconds(identifier), UTC)


def lowest_id(moment: datetime) -> UUID:
    """The smallest UUIDv7 of that millisecond: time filters are ranges of ids.

    A time without a zone is UTC.
    """
    aware = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    milliseconds = max(0, int(aware.timestamp() * 1000))
    return UUID(int=(milliseconds & ((1 << 48) - 1)) << 80 | 0x7 << 76 | 0b10 << 62)
