"""Prices of tokens and engine time, by model, each from a day on."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date

from app.core.database import Database

ANY_MODEL = "*"

# The price of a row `u` of the ledger: its model's own on that day, or that of all models.
PRICE = f"""LATERAL (
  SELECT prompt, completion, engine_second FROM model_prices
  WHERE model_name IN (u.model_name, '{ANY_MODEL}') AND since <= u.day
  ORDER BY model_name = '{ANY_MODEL}', since DESC LIMIT 1) p ON true"""
# NULL where no price is set.
COST = """sum(u.prompt_tokens * p.prompt / 1000000 + u.completion_tokens * p.completion / 1000000
    + u.engine_microseconds * p.engine_second / 1000000)"""

_LIST = """
SELECT model_name, since, prompt, completion, engine_second FROM model_prices
ORDER BY model_name, since DESC
"""
_SET = """
INSERT INTO model_prices (model_name, since, prompt, completion, engine_second)
VALUES ($1, $2, $3, $4, $5)
ON CONFLICT (model_name, since) DO UPDATE SET prompt = excluded.prompt,
  completion = excluded.completion, engine_second = excluded.engine_second
"""
_REMOVE = "DELETE FROM model_prices WHERE model_name = $1 AND since = $2 RETURNING since"


@dataclass(slots=True, frozen=True)
class Price:
    """Prices of a model from a day on: of a million tokens, and of a second of its engine."""

    model_name: str
    since: date
    prompt: float = 0.0
    completion: float = 0.0
    engine_second: float = 0.0


class Prices:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def list(self) -> Sequence[Price]:
        return [Price(**row) for row in await self._database.fetch(_LIST)]

    async def set(self, price: Price) -> None:
        """Set a model's prices from a day on, until the day of its next ones."""
        await self._database.fetch(
            _SET, price.model_name, price.since, price.prompt, price.completion, price.engine_second
        )

    async def remove(self, model_name: str, since: date) -> bool:
        return bool(await self._database.fetch(_REMOVE, model_name, since))
