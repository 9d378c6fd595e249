"""infini-gram: what our routes and our attribution add to the package's own engine.

The index is built of made-up text (bench/corpus.py: 50 MB are 16 million tokens of an 8,000-word
tokenizer). Before anything is measured, a thousand random requests of each type are answered by the
API and by the package itself, and compared. Then counts of one to eight tokens (the bare engine in
a loop, the API with one caller and with eight), and attributions of 500-token texts made of pieces of
the corpus, with the default parameters (`attribute` of app/infini_gram, beside the package that
finds the same spans and fetches the same documents, and does no more). At last polls while as many
attributions run as an attribution worker has engines. Arms take turns.
"""

import asyncio
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import orjson

from app.infini_gram.attribution import AttributionParameters, AttributionRequest, attribute
from app.infini_gram.build_options import BuildOptions
from app.infini_gram.builder import build
from app.infini_gram.declarations import Declaration
from app.infini_gram.engine import Engine
from bench import progress
from bench.corpus import texts, train_tokenizer, write_corpus
from bench.cpu import Sample, measure
from bench.fill import fill
from bench.index_questions import KINDS, Asker, Bare, FileWords, Wire
from bench.load import HOST, Load, connect, get, post
from bench.poller import poll
from bench.report import Options, Report, median_ratio
from bench.servers import House, Server

NAME = "words"
SEED = 17
_QUESTIONS = 1000  # of each type
_CALLERS = 8
_RESPONSE_TOKENS = 500
_REQUESTS = 2000  # different ones of each arm
_POLLER_STARTS = 1.0  # seconds


async def run(house: House, options: Options) -> Report:
    """Build the index, compare answers, then measure."""
    directory = house.directory / "indexes"
    directory.mkdir()
    progress.show(f"building an index of {options.corpus:,} bytes")
    began = time.perf_counter()
    size = await asyncio.to_thread(_build, directory, options.corpus)
    seconds = time.perf_counter() - began
    report = Report(
        "NGRAM",
        f"infini-gram over {options.corpus:,} bytes",
        ["a second", "p50 ms", "p99 ms", "CPU us"],
    )
    report.notes.append(f"{size:,} tokens; corpus, tokenizer and index in {seconds:.0f} s")
    words = FileWords(directory / "tokenizer.json")
    engine = Engine(Declaration(NAME, directory / NAME, str(directory / "tokenizer.json")))
    bare = Bare(directory / NAME, "u16", engine.end_id, engine.vocab_size, words)
    asker = Asker(bare, words, list(islice(texts(SEED), 5000)), engine.vocab_size, SEED)
    environment = await house.environment("bench_ngram")
    environment["LLM_INDEXES_FILE"] = str(directory / "indexes.toml")
    connection = await house.connect("bench_ngram")
    await fill(connection, 100)
    result_id = await connection.fetchval("SELECT min(id::text)::uuid FROM results")
    await connection.close()
    async with house.api(environment) as api:
        questions = min(_QUESTIONS, options.corpus // 40_000)
        progress.show(f"comparing {questions:,} answers of each type")
        differing = await _compare(api, engine, bare, asker, questions)
        await _count(api, bare, asker, options, report)
        await _health(api, asker, options, report)
        engines = ("--kind", "attribution", "--index", NAME, "--engines", str(_CALLERS))
        async with house.worker(environment, *engines):
            await _beside_attributions(api, result_id, asker, options, report)
    _attribute(engine, bare, asker, options, report)
    report.check(f"answers that differ, of {questions:,} of each type", differing, "<=", 0)
    return report


def _build(directory: Path, size: int) -> int:
    """The number of its tokens."""
    corpus, tokenizer = directory / "corpus.jsonl", directory / "tokenizer.json"
    write_corpus(corpus, size, SEED)
    train_tokenizer(tokenizer, SEED)
    manifest = build(BuildOptions(corpus, directory / NAME, str(tokenizer)))
    (directory / "indexes.toml").write_text(
        f'[indexes.{NAME}]\npath = "{NAME}"\ntokenizer = "tokenizer.json"\n'
    )
    return manifest.tokens


async def _compare(api: Server, engine: Engine, bare: Bare, asker: Asker, questions: int) -> int:
    """The number of answers that differ from the package's."""
    differing = 0
    url = f"http://{HOST}:{api.port}/{NAME}"
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        for kind in KINDS:
            for _ in range(questions):
                body = asker.body(kind)
                if kind == "attribution":
                    request = AttributionRequest.model_validate(body)
                    content = orjson.dumps(attribute(engine, request, request.response))
                elif kind == "documents":
                    content = (await client.get(f"{url}/documents/", params=body)).content
                else:
                    content = (await client.post(f"{url}/{kind}", json=body)).content
                differing += orjson.loads(content) != bare.answer(kind, body)
    return differing


async def _count(api: Server, bare: Bare, asker: Asker, options: Options, report: Report) -> None:
    queries = [asker.ids() for _ in range(_REQUESTS)]
    requests = [post(f"/{NAME}/count", orjson.dumps({"query": ids})) for ids in queries]
    alone: list[Load] = []
    cpu: list[float] = []
    asked: dict[int, list[Sample]] = {1: [], _CALLERS: []}
    for turn in range(-1, options.rounds):  # the first one warms up
        progress.show("count", turn, options.rounds)
        load, spent = _in_a_loop(bare.package.count, queries, options.seconds)
        for callers, samples in asked.items():
            async with connect(api.port, callers) as connections:
                work = connections.run(_in_turn(requests), options.seconds, (200,))
                sample = await measure({"api": api.pid}, work)
            if turn >= 0:
                samples.append(sample)
        if turn >= 0:
            alone.append(load)
            cpu.append(spent)
    report.rows.append(("count, the package in a loop", _figures(alone, cpu)))
    for callers, samples in asked.items():
        loads = [sample.load for sample in samples]
        spent_by_api = [sample.microseconds("api") for sample in samples]
        report.rows.append((f"count, API, callers: {callers}", _figures(loads, spent_by_api)))
    ratio = median_ratio(
        [sample.load.median_milliseconds() for sample in asked[1]],
        [load.median_milliseconds() for load in alone],
    )
    report.notes.append(f"count: the API's p50 with one caller is {ratio:.1f} of the package's")
    report.check(
        "CPU of the API per count",
        statistics.median(sample.microseconds("api") for sample in asked[_CALLERS]),
        "<=",
        1000,
        "us",
    )


async def _health(api: Server, asker: Asker, options: Options, report: Report) -> None:
    """GET /health alone, and beside callers of the slowest query."""
    slow = post(f"/{NAME}/ntd", orjson.dumps({"query": asker.ids(1), "maxSupport": 10_000}))
    health = get("/health")
    loads: dict[str, list[Load]] = {"alone": [], f"beside {_CALLERS} callers of ntd": []}
    for turn in range(-1, options.rounds):
        progress.show("GET /health beside counts", turn, options.rounds)
        for name, measured in loads.items():
            async with connect(api.port, 1) as one, connect(api.port, _CALLERS) as others:
                work = one.run(lambda: health, options.seconds / 2, (200,))
                if name == "alone":
                    load = await work
                else:
                    load, _ = await asyncio.gather(
                        work, others.run(lambda: slow, options.seconds / 2, (200,))
                    )
            if turn >= 0:
                measured.append(load)
    for name, measured in loads.items():
        report.rows.append((f"GET /health, {name}", _figures(measured, [])))


async def _beside_attributions(
    api: Server, result_id: UUID, asker: Asker, options: Options, report: Report
) -> None:
    """GET /health and a result, alone and while as many attributions run as there are engines.

    One caller in a process of its own. Each text is a new one, so that no answer comes from a cache.
    """
    numbers = count()

    def text() -> bytes:
        response = f"{asker.response(_RESPONSE_TOKENS)} {next(numbers)}".replace("\0", " ")
        return post(f"/{NAME}/attribution", orjson.dumps({"response": response}))

    watched = {"/health": "/health", "a result": f"/results/{result_id}"}
    loads: dict[tuple[str, bool], list[Load]] = {
        (name, is_busy): [] for name in watched for is_busy in (False, True)
    }
    attributions: list[Load] = []
    for turn in range(-1, options.rounds):
        progress.show("polls beside attributions", turn, options.rounds)
        for (name, is_busy), measured in loads.items():
            polls = poll(api.port, watched[name], options.seconds)
            if is_busy:
                async with connect(api.port, _CALLERS) as others:
                    # The poller begins a little later, and ends within.
                    work = others.run(text, options.seconds + _POLLER_STARTS, (200,))
                    load, attributed = await asyncio.gather(polls, work)
                attributions.append(attributed)
            else:
                load = await polls
            if turn >= 0:
                measured.append(load)
    report.rows.append(
        (f"POST attribution, {_CALLERS} engines and callers", _figures(attributions, []))
    )
    for (name, is_busy), measured in loads.items():
        beside = f"beside {_CALLERS} attributions" if is_busy else "alone"
        report.rows.append((f"GET {name}, {beside}", _figures(measured, [])))
    for name in watched:
        ratio = median_ratio(
            [load.milliseconds(0.99) for load in loads[name, True]],
            [load.milliseconds(0.99) for load in loads[name, False]],
        )
        report.check(f"GET {name}: p99 beside {_CALLERS} attributions, of alone", ratio, "<=", 2.0)


def _attribute(engine: Engine, bare: Bare, asker: Asker, options: Options, report: Report) -> None:
    responses = [asker.response(_RESPONSE_TOKENS) for _ in range(50)]
    parameters = AttributionParameters()
    loads: dict[str, list[Load]] = {"attribute": [], "package": [], "search": []}
    spent: dict[str, list[float]] = {name: [] for name in loads}
    work: dict[str, Callable[[str], object]] = {
        "attribute": lambda response: attribute(engine, parameters, response),
        "package": lambda response: _with_documents(bare, response, parameters),
        "search": lambda response: _search(bare, response, parameters),
    }
    for turn in range(-1, options.rounds):
        progress.show("attribution", turn, options.rounds)
        for name, call in work.items():
            load, cpu = _in_a_loop(call, responses, options.seconds)
            if turn >= 0:
                loads[name].append(load)
                spent[name].append(cpu)
    names = {
        "attribute": f"attribution of {_RESPONSE_TOKENS} tokens",
        "package": "the package: spans and documents",
        "search": "the package: spans alone",
    }
    for name, text in names.items():
        report.rows.append((text, _figures(loads[name], spent[name])))
    medians = {
        name: [load.median_milliseconds() for load in measured] for name, measured in loads.items()
    }
    ratio = median_ratio(medians["attribute"], medians["package"])
    report.check("attribution: p50, of the package's with documents", ratio, "<=", 2.0)


def _search(bare: Bare, response: str, parameters: AttributionParameters) -> tuple[int, list[Wire]]:
    ids = bare.ids(response)
    found = bare.package.attribute(
        ids, [], parameters.minimum_span_length, parameters.maximum_frequency, True
    )
    return len(ids), found["spans"]


def _with_documents(bare: Bare, response: str, parameters: AttributionParameters) -> object:
    """The documents of the longest spans, as many as ours has."""
    tokens, spans = _search(bare, response, parameters)
    spans.sort(key=lambda span: span["length"], reverse=True)
    most = -int(-tokens * parameters.maximum_span_density // 1)
    return bare.package.get_docs_by_ptrs_2(
        [
            (place["s"], place["ptr"], span["length"], parameters.maximum_context_length)
            for span in spans[:most]
            for place in span["docs"][: parameters.maximum_documents_per_span]
        ]
    )


def _in_a_loop(
    call: Callable[[Any], object], given: Sequence[Any], seconds: float
) -> tuple[Load, float]:
    """Call it for so many seconds; the latencies, and CPU microseconds a call."""
    load = Load()
    gc.collect()
    began, cpu = time.perf_counter(), time.process_time()
    while (now := time.perf_counter()) < began + seconds:
        call(given[load.count % len(given)])
        load.latencies.append(time.perf_counter() - now)
        load.count += 1
    load.rate = load.count / seconds
    return load, (time.process_time() - cpu) / load.count * 1e6


def _in_turn(requests: Sequence[bytes]) -> Callable[[], bytes]:
    count = 0

    def following() -> bytes:
        nonlocal count
        count += 1
        return requests[count % len(requests)]

    return following


def _figures(loads: Sequence[Load], cpu: Sequence[float]) -> list[float | None]:
    """Medians over the rounds."""
    return [
        statistics.median(load.rate for load in loads),
        statistics.median(load.median_milliseconds() for load in loads),
        statistics.median(load.milliseconds(0.99) for load in loads),
        statistics.median(cpu) if cpu else None,
    ]
