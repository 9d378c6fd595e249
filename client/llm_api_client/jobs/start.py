"""The start of a map over a data set: its rows, its prompts, and the job that keeps its answers."""

import os
from collections.abc import Mapping
from itertools import chain
from typing import Any, Literal

from llm_api_client.errors import ConfigurationError
from llm_api_client.jobs.batches import Batch, Batcher, KeyOf, digest
from llm_api_client.jobs.mapping import Course
from llm_api_client.jobs.ordering import Ordering
from llm_api_client.jobs.output import AnswerFile
from llm_api_client.jobs.progress import Progress
from llm_api_client.jobs.prompts import Template, compile_prompt
from llm_api_client.jobs.rankings import Ranking, compile_ranking
from llm_api_client.jobs.records import Value
from llm_api_client.jobs.sources import open_source
from llm_api_client.jobs.structured import parser_of, schema_of
from llm_api_client.operations import jobs
from llm_api_client.steps import Call

# Rows that may wait for their turn with order="input"; a vector takes more memory than a text.
_WINDOW, _VECTOR_WINDOW = 10_000, 2_000


def start_map(
    rows: Any,
    prompt: Template | Ranking = None,
    *,
    model: str,
    key: KeyOf = None,
    parameters: Mapping[str, Any] | None = None,
    embedding: Mapping[str, Any] | None = None,
    score: Mapping[str, Any] | None = None,
    name: str | None = None,
    structured: type[Value] | None = None,
    order: Literal["completed", "input"] = "completed",
    out: str | os.PathLike[str] | None = None,
    window: int | None = None,
    progress: bool | None = None,
    priority: int | None = None,
    deadline_seconds: float | None = None,
    webhook_url: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    reuse: bool | None = None,
) -> Call[Course[Value]]:
    """Apply a model to each row of a data set; iterate over the job, or `run` it.

    The service keeps the job. The same call again, after any interruption and on any machine, continues it:
    no row is answered twice, and none is left out.

    Args:
        rows: an iterable of mappings or texts; a data frame of pandas or polars; a data set of Hugging Face;
            the path of a JSONL, CSV, TSV or Parquet file.
        prompt: a text with `{column}` in braces, chat messages with such texts, or a function of the row.
            None: the rows are texts or lists of messages. With `score`: a mapping of `query` and
            `documents`, both templates; `{column}` alone may have a list of documents. A function
            returns such a mapping of texts. None: these are the names of the columns.
        model: the model's name.
        key: the column, or a function of the row, that names each row; default: its number.
        parameters: of sampling, such as `max_tokens`.
        embedding: compute the vector of each row instead of a text (`Row.vector`), with these options, such
            as `dimensions`; {} for none.
        score: compute the scores of each row's documents for its query instead of a text
            (`Row.scores`), with these options, such as `raw`; {} for none.
        name: of the job; the same name continues the same job. Default: derived from the model, the
            prompts of the first thousand rows, and the size of the data.
        structured: a pydantic model or a msgspec type: the answers are JSON of its schema, and `Row.value`
            is an object of it.
        order: `completed`: rows in the order of their ends; `input`: in the order of the data, each with
            its `input`.
        out: a .jsonl or .parquet file of the answers, which a later call continues.
        window: most rows that are sent and not read yet; default: as many as the service takes, so that
            the job goes on without this process; 10,000 with order="input", and 2,000 with vectors.
        progress: show a bar; default: on terminals and in notebooks.
        priority: of the rows, -100 to 100; default: -1.
        deadline_seconds: of each row.
        webhook_url: kept with the job.
        metadata: of the job.
        reuse: True: completed results of equal requests answer rows, as in `send`.

    Raises:
        ConfigurationError: the template names a column that the rows lack, for example; nothing was sent.
    """
    output = None
    if out is not None:
        if order == "input":
            raise ConfigurationError(
                "A file of answers has the order of their ends: leave out order=."
            )
        output = AnswerFile(out)
    source = open_source(rows)
    options = {"model": model, **_task(parameters, embedding, score, structured)}
    if reuse is not None:
        options["reuse"] = reuse
    fill = compile_ranking(prompt) if score is not None else compile_prompt(prompt)
    batcher = Batcher(source, fill, key, options, keeps_input=order == "input")
    batches = iter(batcher)
    first = next(batches, None)
    _check(first)
    info = yield from jobs.create(
        name or "",
        key=f"name {name}" if name else f"rows {digest(source, first)}",
        total=source.total,
        priority=priority,
        deadline_seconds=deadline_seconds,
        webhook_url=webhook_url,
        metadata=metadata,
    )
    return Course(
        job_id=info.id,
        progress=Progress(is_shown=progress, total=source.total),
        batches=chain([first] if first else [], batches),
        window=window or _window_of(order, embedding),
        output=output,
        ordering=Ordering() if order == "input" else None,
        parse=None if structured is None else parser_of(structured),
    )


def _task(
    parameters: Mapping[str, Any] | None,
    embedding: Mapping[str, Any] | None,
    score: Mapping[str, Any] | None,
    structured: type[Any] | None,
) -> dict[str, Any]:
    """The members of a request that name what the model computes."""
    given = {"embedding": embedding, "score": score}
    pooling = {name: dict(options) for name, options in given.items() if options is not None}
    if len(pooling) > 1:
        raise ConfigurationError("Give embedding= or score=, not both.")
    if pooling:
        if parameters or structured is not None:
            raise ConfigurationError(
                "Vectors and scores are no texts: leave out parameters= and structured= with "
                "embedding= or score=."
            )
        return dict(pooling)
    sampling = dict(parameters or {})
    if structured is not None:
        sampling["structured_outputs"] = {"json": schema_of(structured)}
    return {"parameters": sampling}


def _window_of(order: str, embedding: Mapping[str, Any] | None) -> int | None:
    if order != "input":
        return None
    return _WINDOW if embedding is None else _VECTOR_WINDOW


def _check(first: Batch | None) -> None:
    """Nothing is sent if none of the first rows can be."""
    if first is not None and first.failed and not first.items:
        error = first.failed[0].error
        raise ConfigurationError(f"No row can be sent: {error.message if error else ''}.")


def open_job(
    job_id: str,
    *,
    structured: type[Value] | None = None,
    out: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
) -> Call[Course[Value]]:
    """Read the rows of a job by its id, on any machine.

    Rows that were not sent yet are sent by `map` alone.

    Args:
        job_id: of the job.
        structured: as in `map`.
        out: as in `map`.
        progress: as in `map`.
    """
    info = yield from jobs.get(job_id)
    return Course(
        job_id=info.id,
        progress=Progress(is_shown=progress, total=info.total),
        output=None if out is None else AnswerFile(out),
        parse=None if structured is None else parser_of(structured),
    )
