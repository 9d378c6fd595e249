"""`python -m app price`: prices of tokens and engine time, by model."""

import argparse
import math
import sys
from datetime import UTC, date, datetime

from app.cli.arguments import add_command, add_subcommands
from app.cli.database import store_command
from app.cli.table import write_table
from app.results.usage.prices import ANY_MODEL, Price, Prices

_HELP = """Prices of models, in the currency of LLM_CURRENCY. A price holds from a UTC day on, until the day
of the model's next one; the usage of earlier days keeps its cost. Those of `*` are for all models without
prices of their own. docs/usage.md describes costs."""
_PRICES = {
    "prompt": "price of a million prompt tokens (0)",
    "completion": "price of a million completion tokens (0)",
    "engine_second": "price of a second of engine time (0)",
}
_MAX_PRICE = 1e9

_on_prices = store_command("price", lambda database, _: Prices(database))


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = _HELP
    actions = add_subcommands(parser)
    add_command(actions, "list", "Show all prices, the newest of each model first.", _list)
    setting = add_command(actions, "set", "Set a model's prices from a day on.", _set)
    for command in (setting, add_command(actions, "unset", "Remove prices of a day.", _unset)):
        command.add_argument("model", help=f"the model, or {ANY_MODEL!r} for all others")
        text = "first day of the prices, as 2026-11-01 (today)"
        command.add_argument("--since", type=_day, metavar="DAY", help=text)
    for name, text in _PRICES.items():
        setting.add_argument(f"--{name.replace('_', '-')}", type=_price, metavar="PRICE", help=text)


def _day(text: str) -> date:
    return date.fromisoformat(text)


_day.__name__ = "day, as 2026-11-01"  # argparse names it in its error


def _price(text: str) -> float:
    value = float(text)
    if not math.isfinite(value) or not 0 <= value <= _MAX_PRICE:
        raise ValueError
    return value


_price.__name__ = "price of 0 to 1,000,000,000"


def _since(options: argparse.Namespace) -> date:
    since: date | None = options.since
    return since or datetime.now(UTC).date()


@_on_prices
async def _list(prices: Prices, _options: argparse.Namespace) -> None:
    table = [["model", "since", *_PRICES]]
    for price in await prices.list():
        values = (getattr(price, name) for name in _PRICES)
        table.append([price.model_name, str(price.since), *(f"{value:.12g}" for value in values)])
    write_table(table)


def _set(options: argparse.Namespace) -> int:
    values = {name: value for name in _PRICES if (value := getattr(options, name)) is not None}
    if not values:
        sys.stderr.write("name at least one price, such as --completion 1.5\n")
        return 2

    @_on_prices
    async def store(prices: Prices, options: argparse.Namespace) -> None:
        await prices.set(Price(options.model, _since(options), **values))

    return store(options)


@_on_prices
async def _unset(prices: Prices, options: argparse.Namespace) -> int:
    since = _since(options)
    if await prices.remove(options.model, since):
        return 0
    sys.stderr.write(f"model {options.model} has no prices since {since} (`price list`)\n")
    return 1
