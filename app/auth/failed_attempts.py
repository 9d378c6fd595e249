"""Rate limit on wrong tokens: a token bucket per client address, in the memory of this process.

Keys have 256 random bits, so guesses never succeed. The limit bounds their load and noise: the client
receives 429, and the log names its address once a minute. Valid tokens are never counted.
https://en.wikipedia.org/wiki/Token_bucket
"""

import logging
from dataclasses import dataclass, field
from ipaddress import IPv6Address, ip_address

logger = logging.getLogger(__name__)

_MAX_ADDRESSES = 10_000
_MINUTE = 60.0
_SITE_BITS = 64  # prefix of one IPv6 subscriber's network: RFC 6177


@dataclass(slots=True)
class _Bucket:
    level: float
    filled_at: float
    # Times by the token's hash: a token that a program repeats is one failure.
    counted: dict[bytes, float] = field(default_factory=dict)
    logged_at: float = -_MINUTE


class FailedAttempts:
    """Counts wrong tokens by client address. `per_minute` is the limit of an address; 0: no limit."""

    def __init__(self, per_minute: int) -> None:
        self._per_minute = per_minute
        self._buckets: dict[str, _Bucket] = {}

    def count(self, address: str, digest: bytes, now: float) -> float | None:
        """Count a failure of the token with this hash, at `now` (a steady clock, seconds).

        Returns the seconds until the next permitted try, or None if the address is below its limit.
        """
        if not self._per_minute:
            return None
        bucket = self._bucket(site_of(address), now)
        if digest in bucket.counted:
            return None
        if bucket.level < 1:
            if now - bucket.logged_at >= _MINUTE:
                bucket.logged_at = now
                logger.warning(
                    "%s tried more than %d wrong tokens in a minute", address[:64], self._per_minute
                )
            return (1 - bucket.level) / self._per_minute * _MINUTE
        bucket.level -= 1
        bucket.counted[digest] = now
        return None

    def _bucket(self, site: str, now: float) -> _Bucket:
        """The site's bucket, filled up to now; the least recently used bucket is evicted."""
        bucket = self._buckets.pop(site, None) or _Bucket(self._per_minute, now)
        if len(self._buckets) >= _MAX_ADDRESSES:
            del self._buckets[next(iter(self._buckets))]
        self._buckets[site] = bucket
        filled = (now - bucket.filled_at) / _MINUTE * self._per_minute
        bucket.level = min(self._per_minute, bucket.level + filled)
        bucket.filled_at = now
        bucket.counted = {digest: at for digest, at in bucket.counted.items() if now - at < _MINUTE}
        return bucket


def site_of(address: str) -> str:
    """The unit of counting: an IPv4 address, or the network of an IPv6 address."""
    try:
        parsed = ip_address(address)
    except ValueError:
        return address[:64]
    if isinstance(parsed, IPv6Address):
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        return f"{int(parsed) >> (128 - _SITE_BITS):x}::/{_SITE_BITS}"
    return str(parsed)
