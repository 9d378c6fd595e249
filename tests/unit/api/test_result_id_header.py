"""X-Result-Id stays readable for clients with small buffers."""

from app.api.group_responses import to_header
from app.core.ids import new_id

# What common proxies and clients read of one header line.
_READABLE = 8190


def test_few_ids_are_all_told_and_many_in_part() -> None:
    few = [new_id() for _ in range(128)]
    assert to_header(few) == ", ".join(str(one) for one in few)
    many = [new_id() for _ in range(1000)]
    told = to_header(many)
    assert len(told) < _READABLE
    assert told.split(", ") == [str(one) for one in many[:200]]
