"""`python -m app budget`: monthly budgets of teams and keys."""

import argparse
import math
import sys

from app.cli.arguments import add_command, add_subcommands
from app.cli.database import store_command
from app.cli.table import write_table
from app.core.settings import Settings
from app.core.url_guard import url_fault, webhook_rules
from app.queue.budgets import WHOLE_TEAM
from app.results.usage.spending import THRESHOLDS, Budget, Spending

_HELP = f"""Monthly budgets. Once the results that ended in a UTC month have used one up, further requests
return 429 `budget_exhausted` until the month ends. The webhook is called at {", ".join(map(str, THRESHOLDS))}
percent. Running processes apply a change within some seconds. docs/usage.md describes budgets."""
_MAX = 1e15

_on_budgets = store_command("budget", lambda database, _: Spending(database))


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = _HELP
    actions = add_subcommands(parser)
    add_command(actions, "list", "Show the budgets and their use.", _list)
    setting = add_command(actions, "set", "Set a budget; omitted bounds are removed.", _set)
    for command in (setting, add_command(actions, "unset", "Remove a budget.", _unset)):
        command.add_argument("team", help="the team's id")
        text = "of this key only: the prefix of an API key, or the token_id of a JWT"
        command.add_argument("--key", default=WHOLE_TEAM, help=text)
    text = "most tokens of prompts and completions in a month"
    setting.add_argument("--tokens", type=_tokens, metavar="N", help=text)
    text = "highest cost in a month, in LLM_CURRENCY (`price`)"
    setting.add_argument("--cost", type=_cost, metavar="N", help=text)
    text = "URL to call at the thresholds, signed with the team's webhook secret"
    setting.add_argument("--webhook", metavar="URL", help=text)


def _tokens(text: str) -> int:
    value = int(text)
    if not 0 < value <= _MAX:
        raise ValueError
    return value


_tokens.__name__ = "positive number"  # argparse names it in its error


def _cost(text: str) -> float:
    value = float(text)
    if not math.isfinite(value) or not 0 < value <= _MAX:
        raise ValueError
    return value


_cost.__name__ = "positive number"


@_on_budgets
async def _list(spending: Spending, _options: argparse.Namespace) -> None:
    table = [["team", "key", "month", "tokens", "of", "cost", "of", "webhook"]]
    for one in await spending.list():
        bounds = one.max_tokens, one.max_cost
        tokens, cost = ("-" if value is None else f"{value:.12g}" for value in bounds)
        month = f"{one.month:%Y-%m}" if one.month else "-"
        table.append(
            [
                *(one.team_id, one.token_id or "-", month, str(one.used_tokens), tokens),
                *(f"{one.used_cost:.2f}", cost, one.webhook_url or "-"),
            ]
        )
    write_table(table)


def _set(options: argparse.Namespace) -> int:
    if options.tokens is None and options.cost is None:
        sys.stderr.write("name at least one bound, such as --tokens 1000000\n")
        return 2
    if options.webhook is not None:
        rules = webhook_rules(allow_private=Settings().webhook_allow_private)
        fault = url_fault(options.webhook, rules)
        if fault:
            sys.stderr.write(f"--webhook: {fault}\n")
            return 2
    budget = Budget(options.team, options.key, options.tokens, options.cost, options.webhook)

    @_on_budgets
    async def store(spending: Spending, _options: argparse.Namespace) -> None:
        await spending.set(budget)

    return store(options)


@_on_budgets
async def _unset(spending: Spending, options: argparse.Namespace) -> int:
    if await spending.remove(options.team, options.key):
        return 0
    key = f", key {options.key}" if options.key else ""
    sys.stderr.write(f"no budget is set for team {options.team}{key}\n")
    return 1
