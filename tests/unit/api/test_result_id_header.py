"""X-Result-Id stays readable for clients with small buffers."""

from app.api.group_responses import to_header
from app.core.ids import new_id

# The length of a header line that common proxies and clients accept.
_READABLE = 8190


def test_few_ids_are_all_listed_and_many_in_part() -> None:
    few = [new_id() for _ in range(128)]
    assert to_header(few) == ", ".join(str(one) for one in few)
    many = [new_id() for _ in range(1000)]
    written = to_header(many)
    assert len(written) < _READABLE
    assert written.split(", ") == [str(one) for one in many[:200]]
