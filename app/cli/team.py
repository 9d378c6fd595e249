"""`python -m app team`: limits, reuse, retention and search of teams."""

import argparse
import sys
from collections.abc import Callable

from app.cli.arguments import add_command, add_subcommands
from app.cli.database import store_command
from app.cli.table import write_table
from app.core.settings.fields import MAX_RETAIN_SECONDS, MIN_RETAIN_SECONDS
from app.queue.team_limits import TeamLimits
from app.results.retention.policy import RetentionPolicy
from app.results.search_policy import SearchPolicy

_HELP = """Limits and reuse of each team for each model. A row for `--model M` overrides the team's row for all
models, which overrides the defaults (LLM_TEAM_MAX_QUEUED and others, docs/settings.md).
Running processes apply a change at once. docs/limits.md describes the limits."""

_RETAIN_HELP = """Retention of a team's results and prompts, from the end of a result. Omitted values are the
settings' (LLM_RESULTS_RETENTION_SECONDS, LLM_PROMPTS_RETENTION_SECONDS). A change takes effect
within a minute, also for existing results: docs/retention.md."""
_SEARCH_HELP = """Whether the words of a team's results are indexed for the search (`q`). `default` goes back to the
setting LLM_SEARCH. A change takes effect at once, for results that end from then on:
docs/history.md."""
_UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}

_NUMBERS = {
    "weight": (float, "share while several teams wait, relative to others' (default 1)"),
    "max_queued": (int, "most unclaimed results"),
    "max_running": (int, "most results running at once; others wait"),
    "requests_per_minute": (int, "most results sent per minute"),
    "tokens_per_minute": (int, "most tokens of prompts and max_tokens per minute"),
}

_REUSE_HELP = "whether equal results answer requests without `reuse` (default off): docs/reuse.md"
_NAMES = (*_NUMBERS, "reuse")

_on_limits = store_command("team", TeamLimits)
_on_retention = store_command("team", RetentionPolicy)
_on_search = store_command("team", SearchPolicy)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = _HELP
    actions = add_subcommands(parser)
    add_command(actions, "list", "Show the stored limits.", _list)
    text = "Set a team's limits; omitted ones get their defaults."
    setting = add_command(actions, "set", text, _set)
    for command in (setting, add_command(actions, "unset", "Go back to the defaults.", _unset)):
        command.add_argument("team", help="the team's id")
        command.add_argument("--model", default="*", help="one model only (default: each model)")
    for name, (kind, text) in _NUMBERS.items():
        setting.add_argument(f"--{name.replace('_', '-')}", type=_positive(kind), help=text)
    setting.add_argument("--reuse", choices=("on", "off"), help=_REUSE_HELP)
    retain = add_command(actions, "retain", _RETAIN_HELP, _retain).add_argument
    retain("team", help="the team's id")
    for flag, what in (("--results", "a result is kept"), ("--prompts", "a prompt is kept")):
        text = f"how long {what}: 90s, 12h, 30d, forever"
        retain(flag, type=_duration, metavar="TIME", help=text)
    search = add_command(actions, "search", _SEARCH_HELP, _set_search).add_argument
    search("team", help="the team's id")
    search("search", choices=("words", "off", "default"), help="what is indexed")


def _positive(kind: type) -> Callable[[str], float]:
    def parse(text: str) -> float:
        value: float = kind(text)
        if not 0 < value < 2**31:
            raise ValueError
        return value

    parse.__name__ = "positive number"  # argparse names it in its error
    return parse


def _duration(text: str) -> float:
    """Seconds; 0 disables the deletion."""
    if text == "forever":
        return 0.0
    value = float(text[:-1]) * _UNITS[text[-1]] if text[-1:] in _UNITS else float(text)
    if not MIN_RETAIN_SECONDS <= value <= MAX_RETAIN_SECONDS:
        raise ValueError
    return value


_duration.__name__ = "time of 60 seconds to 100 years"


_Stores = tuple[TeamLimits, RetentionPolicy, SearchPolicy]


@store_command(
    "team", lambda *parts: (TeamLimits(*parts), RetentionPolicy(*parts), SearchPolicy(*parts))
)
async def _list(stores: _Stores, _options: argparse.Namespace) -> None:
    limits, retention, search = stores
    table = [["team", "model", *_NAMES]]
    for team, model, values in await limits.stored():
        table.append([team, model, *(_value_text(values.get(name)) for name in _NAMES)])
    write_table(table)
    if own := await retention.stored():
        sys.stdout.write("\n")
        kept = [[team, *map(_duration_text, seconds)] for team, *seconds in own]
        write_table([["team", "results kept", "prompts kept"], *kept])
    if searches := await search.stored():
        sys.stdout.write("\n")
        write_table([["team", "search"], *searches])


def _value_text(value: float | bool | None) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "-" if value is None else str(value)


def _duration_text(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return "forever" if seconds == 0 else f"{seconds:.0f}s"


@_on_retention
async def _retain(policy: RetentionPolicy, options: argparse.Namespace) -> None:
    if options.results is None and options.prompts is None:
        await policy.remove(options.team)
    else:
        await policy.set(options.team, options.results, options.prompts)


@_on_search
async def _set_search(policy: SearchPolicy, options: argparse.Namespace) -> None:
    if options.search == "default":
        await policy.remove(options.team)
    else:
        await policy.set(options.team, options.search)


def _set(options: argparse.Namespace) -> int:
    values = {name: value for name in _NUMBERS if (value := getattr(options, name)) is not None}
    if options.reuse is not None:
        values["reuse"] = options.reuse == "on"
    if not values:
        sys.stderr.write("name at least one value, such as --max-queued 1000\n")
        return 2

    @_on_limits
    async def store(limits: TeamLimits, options: argparse.Namespace) -> None:
        await limits.set(options.team, options.model, values)

    return store(options)


@_on_limits
async def _unset(limits: TeamLimits, options: argparse.Namespace) -> int:
    if await limits.remove(options.team, options.model):
        return 0
    sys.stderr.write(f"no limits are set for team {options.team}, model {options.model}\n")
    return 1
