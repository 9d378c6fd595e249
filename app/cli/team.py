"""`python -m app team`: limits and retention of teams."""

import argparse
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from app.cli.arguments import Subcommands, add_command, add_subcommands
from app.cli.table import write_table
from app.core.settings import Settings
from app.core.settings.fields import MAX_RETAIN_SECONDS, MIN_RETAIN_SECONDS

if TYPE_CHECKING:
    from app.core.database import Database
    from app.queue.team_limits import TeamLimits
    from app.results.retention.policy import RetentionPolicy

_HELP = """Limits of each team for each model. A row for `--model M` overrides the team's row for all
models, which overrides the defaults (LLM_TEAM_MAX_QUEUED and others, docs/settings.md).
Running processes apply a change at once. docs/limits.md describes the limits."""

_RETAIN_HELP = """Retention of a team's results and prompts, from the end of a result. Omitted values are the
settings' (LLM_RESULTS_RETENTION_SECONDS, LLM_PROMPTS_RETENTION_SECONDS). A change takes effect
within a minute, also for existing results: docs/retention.md."""
_UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}

_NUMBERS = {
    "--weight": (float, "share while several teams wait, relative to others' (default 1)"),
    "--max-queued": (int, "most unclaimed results"),
    "--max-running": (int, "most results running at once; others wait"),
    "--requests-per-minute": (int, "most results sent per minute"),
    "--tokens-per-minute": (int, "most tokens of prompts and max_tokens per minute"),
}


def add_to(commands: Subcommands) -> None:
    text = "Show and set limits of teams: queue, rates, shares."
    parser = add_command(commands, "team", text, description=_HELP)
    actions = add_subcommands(parser)

    add_command(actions, "list", "Show the stored limits.", _list)
    setting = add_command(
        actions, "set", "Set a team's limits; omitted ones get their defaults.", _set
    )
    _add_key(setting)
    for flag, (kind, text) in _NUMBERS.items():
        setting.add_argument(flag, type=_positive(kind), help=text)
    _add_key(add_command(actions, "unset", "Go back to the defaults.", _unset))
    retaining = add_command(actions, "retain", _RETAIN_HELP, _retain)
    retaining.add_argument("team", help="the team's id")
    for flag, what in (("--results", "a result is kept"), ("--prompts", "a prompt is kept")):
        retaining.add_argument(
            flag, type=_duration, metavar="TIME", help=f"how long {what}: 90s, 12h, 30d, forever"
        )


def _add_key(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("team", help="the team's id")
    parser.add_argument("--model", default="*", help="one model only (default: each model)")


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


def _list(_options: argparse.Namespace) -> int:
    async def work(limits: "TeamLimits", retention: "RetentionPolicy") -> int:
        rows = await limits.stored()
        names = [flag.removeprefix("--").replace("-", "_") for flag in _NUMBERS]
        table = [["team", "model", *names]]
        for team, model, values in rows:
            table.append([team, model, *(str(values.get(name, "-")) for name in names)])
        write_table(table)
        if own := await retention.stored():
            sys.stdout.write("\n")
            kept = [
                (team, _duration_text(results), _duration_text(prompts))
                for team, results, prompts in own
            ]
            write_table([["team", "results kept", "prompts kept"], *map(list, kept)])
        return 0

    def open_both(database: "Database", settings: Settings) -> Awaitable[int]:
        from app.queue.team_limits import TeamLimits
        from app.results.retention.policy import RetentionPolicy

        return work(TeamLimits(database, settings), RetentionPolicy(database, settings))

    return _with_database(open_both)


def _duration_text(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return "forever" if seconds == 0 else f"{seconds:.0f}s"


def _retain(options: argparse.Namespace) -> int:
    async def work(database: "Database", settings: Settings) -> int:
        from app.results.retention.policy import RetentionPolicy

        policy = RetentionPolicy(database, settings)
        if options.results is None and options.prompts is None:
            await policy.remove(options.team)
        else:
            await policy.set(options.team, options.results, options.prompts)
        return 0

    return _with_database(work)


def _set(options: argparse.Namespace) -> int:
    names = (flag.removeprefix("--").replace("-", "_") for flag in _NUMBERS)
    values = {name: value for name in names if (value := getattr(options, name)) is not None}
    if not values:
        sys.stderr.write("name at least one limit, such as --max-queued 1000\n")
        return 2

    async def work(limits: "TeamLimits") -> int:
        await limits.set(options.team, options.model, values)
        return 0

    return _with_limits(work)


def _unset(options: argparse.Namespace) -> int:
    async def work(limits: "TeamLimits") -> int:
        if await limits.remove(options.team, options.model):
            return 0
        sys.stderr.write(f"no limits are set for team {options.team}, model {options.model}\n")
        return 1

    return _with_limits(work)


def _with_limits(work: Callable[["TeamLimits"], Awaitable[int]]) -> int:
    from app.queue.team_limits import TeamLimits

    return _with_database(lambda database, settings: work(TeamLimits(database, settings)))


def _with_database(work: Callable[["Database", Settings], Awaitable[int]]) -> int:
    from app.cli.database import with_database

    return with_database("team", work)
