"""Clients that send one order after another until they are stopped."""

import asyncio
import itertools
from collections.abc import Iterator

from tests.chaos.storm.client import Client, GivenUpError, Scene
from tests.chaos.storm.dialects import DIALECTS
from tests.chaos.storm.orders import draw
from tests.chaos.storm.raw_http import NoAnswerError


async def send(scene: Scene, crowd: int) -> None:
    """Have so many clients send; return when each has the end of its last order."""
    numbers = itertools.count()
    await asyncio.gather(*(_be_one(scene, numbers) for _ in range(crowd)))


async def _be_one(scene: Scene, numbers: Iterator[int]) -> None:
    while not scene.is_over:
        order = draw(scene.seed, next(numbers), with_vllm=scene.with_vllm)
        scene.log.orders.append(order)
        scene.under_way += 1
        try:
            await DIALECTS[order.dialect](Client(scene, order))
        except NoAnswerError as error:
            order.faults.append(str(error))
        except GivenUpError as error:
            order.faults.append(f"no end: {error}")
        except asyncio.CancelledError:
            order.faults.append("no end: it was still waiting when all clients were stopped")
            raise
        except (AssertionError, KeyError, ValueError, TypeError, OSError) as error:
            order.faults.append(f"{type(error).__name__}: {error}")
        finally:
            scene.under_way -= 1
