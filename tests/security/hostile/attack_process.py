"""The hostile team, in a process of its own: its work must not delay the measured team's clients.

`python -m tests.security.hostile.attack_process` reads an `Order` as a line of JSON, attacks until its standard
input ends, and writes an `Account` as JSON.
"""

import asyncio
import contextlib
import itertools
import os
import random
import sys
from dataclasses import asdict
from pathlib import Path

import orjson
import uvloop

from tests.security.hostile.attacker import Account, Attacker, Order
from tests.security.hostile.connection_attacks import CONNECTIONS
from tests.security.hostile.cost_attacks import COSTS, suspects
from tests.security.hostile.image_attacks import images
from tests.security.hostile.pooling_attacks import POOLING
from tests.security.hostile.request_attacks import REQUESTS

_ATTACKS = (*REQUESTS, images, *POOLING, *COSTS, *CONNECTIONS)
# An attack that takes a model from all others for a share of its time is measured apart.
SHARES = (suspects.__name__,)
ATTACKS = tuple(one.__name__ for one in _ATTACKS if one.__name__ not in SHARES)
_NICENESS = 10  # on the machine of the service, whose processes it must not slow by its own work


async def attack(order: Order) -> Account:
    """Attack until standard input ends; every attack comes once before any comes again."""
    account, numbers = Account(), itertools.count()

    async def be_one() -> None:
        while True:
            number = next(numbers)
            attacks = [one for one in _ATTACKS if one.__name__ in order.attacks]
            random.Random(f"{order.seed}:{number // len(attacks)}").shuffle(attacks)  # noqa: S311
            chosen = attacks[number % len(attacks)]
            chance = random.Random(f"{order.seed}:{number}")  # noqa: S311 # no secret
            attacker = Attacker(order, account, chosen.__name__, chance)
            with attacker.held:
                await chosen(attacker)

    ended = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    attackers = [asyncio.create_task(be_one()) for _ in range(order.attackers)]
    await asyncio.wait([ended, *attackers], return_when=asyncio.FIRST_COMPLETED)
    for one in attackers:
        one.cancel()
    for end in await asyncio.gather(*attackers, return_exceptions=True):
        if not isinstance(end, asyncio.CancelledError):
            account.faults.append(f"an attack is wrong itself: {end!r}")
    return account


def main() -> None:
    with contextlib.suppress(OSError):
        os.nice(_NICENESS)
        # Linux may schedule a session as one: then the niceness of its processes counts among them only.
        Path("/proc/self/autogroup").write_text(str(_NICENESS))
    order = Order(**orjson.loads(sys.stdin.readline()))
    account = uvloop.run(attack(order))
    sys.stdout.buffer.write(orjson.dumps(asdict(account)))


if __name__ == "__main__":
    main()
