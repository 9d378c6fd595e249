"""`python -m app usage`: tokens and engine time of results, from the ledger."""

import argparse
import csv
import sys
from dataclasses import astuple
from datetime import UTC, date, datetime

from app.cli.database import store_command
from app.cli.table import write_table
from app.results.usage.report import GROUPS, Group, Usage, UsageQuery, UsageReports, UsageRow

_HELP = """Results that ended in a period of UTC days, with their tokens and engine time, of all teams or
of one. By default: this month, by team and model. docs/usage.md describes the columns."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = _HELP
    add = parser.add_argument
    add("--from", dest="first", type=_day, metavar="DAY", help="first day, as 2026-11-01")
    add("--to", dest="last", type=_day, metavar="DAY", help="last day (today)")
    text = f"columns to group by, separated by commas: {', '.join(GROUPS)} (team,model)"
    add("--group-by", type=_groups, default=["team", "model"], metavar="COLUMNS", help=text)
    add("--team", help="of this team only")
    add("--key", help="of this key only: the prefix of an API key, or the token_id of a JWT")
    add("--model", help="of this model only")
    add("--csv", action="store_true", help="write CSV instead of a table")
    parser.set_defaults(run=_report)


def _day(text: str) -> date:
    return date.fromisoformat(text)


_day.__name__ = "day, as 2026-11-01"  # argparse names it in its error


def _groups(text: str) -> list[Group]:
    known: dict[str, Group] = {group: group for group in GROUPS}
    groups = [known.get(name) for name in text.split(",")]
    found = [group for group in groups if group is not None]
    if len(set(found)) < len(groups):
        raise argparse.ArgumentTypeError(f"names, each once, of {', '.join(GROUPS)}")
    return found


@store_command("usage", lambda database, _: UsageReports(database))
async def _report(reports: UsageReports, options: argparse.Namespace) -> None:
    last = options.last or datetime.now(UTC).date()
    query = UsageQuery(
        first=options.first or last.replace(day=1),
        last=last,
        group_by=options.group_by,
        team_id=options.team,
        token_id=options.key,
        model_name=options.model,
    )
    table = [[*query.group_by, *Usage.__slots__], *map(_cells, await reports.read(query))]
    if options.csv:
        csv.writer(sys.stdout, lineterminator="\n").writerows(table)
    else:
        write_table(table)


def _cells(row: UsageRow) -> list[str]:
    return [*row.group.values(), *(str(value) for value in astuple(row.usage))]
