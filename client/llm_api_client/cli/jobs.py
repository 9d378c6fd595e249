"""Commands on jobs: map a file, list jobs, retry and cancel them."""

import argparse

from llm_api_client.cli.arguments import (
    Arguments,
    Subparsers,
    add_parameters,
    add_reuse,
    model_of,
    parameters_of,
)
from llm_api_client.cli.output import Output
from llm_api_client.client import Client
from llm_api_client.errors import ConfigurationError
from llm_api_client.jobs.handles import Job
from llm_api_client.jobs.output import line_of
from llm_api_client.jobs.prompts import Template
from llm_api_client.jobs.rankings import Ranking
from llm_api_client.jobs.records import JobInfo


def add_commands(commands: Subparsers) -> None:
    """Add the commands to the parser."""
    mapping = commands.add_parser("map", help="apply a model to each row of a file")
    mapping.add_argument("file", help="JSONL, CSV, TSV or Parquet")
    prompt = mapping.add_argument("-t", "--prompt-template", metavar="TEXT")
    prompt.help = "with {column}; default: the rows are texts"
    mapping.add_argument("--system", metavar="TEXT", help="send chats with this system message")
    mapping.add_argument(
        "-o", "--out", help=".jsonl or .parquet; default: lines on standard output"
    )
    mapping.add_argument(
        "-k", "--key", metavar="COLUMN", help="names each row; default: its number"
    )
    mapping.add_argument("-m", "--model", help="default: the only model that is ready")
    mapping.add_argument("--name", help="of the job; the same name continues the same job")
    mapping.add_argument("--priority", type=int, help="-100 to 100; default: -1")
    add_parameters(mapping)
    add_reuse(mapping)
    _add_tasks(mapping)
    mapping.set_defaults(run=_map)
    job = commands.add_parser("job", help="list jobs, or read, retry or cancel one")
    job.add_argument("id", nargs="?", help="none: list the jobs")
    action = job.add_mutually_exclusive_group()
    action.add_argument("--retry-failed", action="store_true", help="send its failed rows again")
    action.add_argument("--cancel", action="store_true", help="cancel its pending rows")
    _add_reading(action, job)
    job.set_defaults(run=_job)


def _add_tasks(mapping: argparse.ArgumentParser) -> None:
    task = mapping.add_mutually_exclusive_group()
    embed = task.add_argument("--embed", action="store_true")
    embed.help = "compute vectors of the rows; -p has their options, such as -p dimensions=256"
    score = task.add_argument("--score", action="store_true")
    score.help = (
        "compute scores of documents for a query; -p has their options, such as -p raw=true"
    )
    query = mapping.add_argument("--query", metavar="TEXT")
    query.help = "with {column}, for --score; default: the column query"
    documents = mapping.add_argument("--documents", metavar="TEXT")
    documents.help = (
        "with {column}, of which one alone may have a list; default: the column documents"
    )


def _add_reading(action: argparse._MutuallyExclusiveGroup, job: argparse.ArgumentParser) -> None:
    action.add_argument("--rows", action="store_true", help="print its rows as they end")
    job.add_argument("-o", "--out", help="write its answers to a file, as map does")


def _map(client: Client, arguments: Arguments, output: Output) -> int:
    given = parameters_of(arguments)
    job = client.map(
        arguments.file,
        _template(arguments),
        model=model_of(client, arguments.model),
        key=arguments.key,
        parameters=None if arguments.embed or arguments.score else given,
        embedding=given if arguments.embed else None,
        score=given if arguments.score else None,
        name=arguments.name,
        out=arguments.out,
        priority=arguments.priority,
        reuse=arguments.reuse,
    )
    output.note(f"job {job.id}")
    return _read(job, output, prints=arguments.out is None)


def _template(arguments: Arguments) -> Template | Ranking:
    text: str | None = arguments.prompt_template
    columns = {"query": arguments.query, "documents": arguments.documents}
    given = {name: value for name, value in columns.items() if value is not None}
    if arguments.score:
        if text is not None or arguments.system is not None:
            raise ConfigurationError("--score takes --query and --documents, not a prompt.")
        return {"query": "{query}", "documents": "{documents}"} | given
    if given:
        raise ConfigurationError("Only --score takes --query and --documents.")
    if arguments.system is None:
        return text
    system = {"role": "system", "content": arguments.system}
    return [system, {"role": "user", "content": text or "{text}"}]


def _read(job: Job[None], output: Output, *, prints: bool) -> int:
    """Read a job to its end; the status is 1 if a row has no answer."""
    failed: set[str] = set()
    for row in job:
        # A failed row that was sent again has an answer after all.
        (failed.discard if row.error is None else failed.add)(row.key)
        if prints:
            output.json(line_of(row))
    if failed:
        output.note(f"{len(failed)} rows have no answer.")
    if not prints:
        _show([job.info()], output)
    return 1 if failed else 0


def _job(client: Client, arguments: Arguments, output: Output) -> int:
    if arguments.id is None:
        _show(list(client.jobs.list(limit=50)), output)
        return 0
    if arguments.retry_failed:
        retried = client.jobs.retry_failed(arguments.id)
        output.note(f"{retried.retried} rows are sent again, {len(retried.refused)} cannot be.")
    elif arguments.cancel:
        client.jobs.cancel(arguments.id)
    elif arguments.rows or arguments.out:
        return _read(client.job(arguments.id, out=arguments.out), output, prints=arguments.rows)
    _show([client.jobs.get(arguments.id)], output)
    return 0


def _show(jobs: list[JobInfo], output: Output) -> None:
    if output.is_json:
        for job in jobs:
            output.json(job)
        return
    rows = (
        (
            job.id, job.state, job.counts.rows, job.counts.pending, job.counts.completed,
            job.counts.failed, job.usage.completion_tokens, job.name,
        )
        for job in jobs
    )  # fmt: skip
    head = ("ID", "STATE", "ROWS", "PENDING", "COMPLETED", "FAILED", "TOKENS", "NAME")
    output.table(head, rows)
