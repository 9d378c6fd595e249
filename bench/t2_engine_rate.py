"""T2: tokens per second of real vLLM through the service, against AsyncLLM alone on the same cores.

64 and 128 results of 256 tokens each are submitted at once: none of them read by a client, then all of
them read as event streams. API and worker are one process. The baseline has the same prompts, the
same engine arguments and the same code that starts the engine, in a process without Triton. Prefill is
part of both. The engine is the committed demo model (5.5 million parameters, float32, on the CPU)
with room for 128 such results. Both engines stay loaded and take turns; only one has anything to do.
"""

import asyncio
import contextlib
import os
import statistics
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson
import psutil

from app.cli.up.triton import EmbeddedTriton
from app.inference.model_repository import CONFIG
from bench import progress, windows
from bench.load import post
from bench.plots import Bar, Bars
from bench.report import Options, Report, median_ratio, medians
from bench.servers import House, Server
from bench.sse_readers import read_streams
from bench.streams import EVENT_STREAM, Stream, at_database
from bench.token_load import submit_unread

_MODEL = "demo-wide"
_RESULTS = (64, 128)
_TOKENS = 256
_TOKENS_A_SECOND = 64  # of a round's length: a short run has shorter results
_WARM_UP = (16, 32)  # results, tokens
_CACHE_BYTES = 512 << 20  # for 128 results of three blocks: none waits for another's end
_DIRECT, _UNREAD, _READ = "AsyncLLM alone", "unread", "all read"
_BOUNDS = {_UNREAD: 0.95, _READ: 0.90}
_COLUMNS = ["tokens/s", "seconds", "API us", "engine us", "Postgres us"]
_ROOT = Path(__file__).resolve().parents[1]
_VENV = _ROOT / ".venv-triton"
_START_SECONDS = 120.0


@dataclass(slots=True, frozen=True)
class _Run:
    seconds: float
    tokens: int
    cpu: Mapping[str, float]  # seconds of each part

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    @property
    def figures(self) -> list[float | None]:
        """See `_COLUMNS`."""
        costs = (
            self.cpu[name] / self.tokens * 1e6 if name in self.cpu else None
            for name in ("api", "engine", "postgres")
        )
        return [self.rate, self.seconds, *costs]


Runs = dict[tuple[int, str], list[_Run]]  # by results and arm


class _Direct:
    """The engine in a process without Triton."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin
        assert process.stdout
        self._input, self._output = process.stdin, process.stdout
        self._parts = {"engine": process.pid}

    async def answer(self) -> object:
        """The process's next line."""
        line = await self._output.readline()
        if not line:
            raise RuntimeError("the engine without the service ended; see its log")
        return orjson.loads(line)

    async def run(self, prompts: Sequence[str], tokens: int) -> _Run:
        """Generate for all prompts at the same time."""
        before = windows.read(self._parts)
        self._input.write(orjson.dumps({"prompts": prompts, "tokens": tokens}) + b"\n")
        done = await self.answer()
        assert isinstance(done, dict)
        return _Run(done["seconds"], int(done["tokens"]), _spent(self._parts, before))


class _Service:
    """The service, and the Triton of its own behind it."""

    def __init__(self, house: House, api: Server) -> None:
        self._port = api.port
        triton = next(
            child.pid
            for child in psutil.Process().children()
            if child.name() == "tritonserver" and child.pid != house.triton_pid
        )
        self._parts = {"api": api.pid, "engine": triton, "postgres": house.postgres_pid}

    async def run(self, prompts: Sequence[str], tokens: int, *, is_read: bool) -> _Run:
        """Submit all prompts at once; the run ends with the last result."""
        before = windows.read(self._parts)
        if is_read:
            streams = await self._read(prompts, tokens)
            ended = max(one.ended for one in streams)
        else:
            streams = await submit_unread(self._port, [_item(one, tokens) for one in prompts])
            ended = max(at_database(one, "finished_at") for one in streams)
        seconds = (ended - min(one.began for one in streams)) / 1e9
        made = sum(one.result["usage"]["completion_tokens"] for one in streams)
        return _Run(seconds, made, _spent(self._parts, before))

    async def _read(self, prompts: Sequence[str], tokens: int) -> list[Stream]:
        requests = [
            post("/results/", orjson.dumps(_item(one, tokens)), f"Accept: {EVENT_STREAM}\r\n")
            for one in prompts
        ]
        return await read_streams(self._port, requests, processes=1, has_clock=False)


def _spent(parts: Mapping[str, int], before: windows.Reading) -> dict[str, float]:
    return {name: now - before.cpu[name] for name, now in windows.read(parts).cpu.items()}


def _item(prompt: str, tokens: int) -> dict[str, object]:
    parameters = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return {"model": _MODEL, "content": prompt, "parameters": parameters}


def prompts_of(results: int, part: str) -> list[str]:
    """Prompts that no other part of the run has: no engine finds them in its cache."""
    return [f"# {part}, {number} of {results}.\n\nimport os\n\n\ndef " for number in range(results)]


async def run(house: House, options: Options) -> Report:
    """Start both engines, and measure them in turn."""
    report = Report("T2", "tokens per second of real vLLM", _COLUMNS)
    entry = _entry(house.directory / _MODEL)
    async with _service(house, entry) as service, _direct(house, entry) as direct:
        runs = await _measure(service, direct, options)
    for (results, arm), done in runs.items():
        name = f"{results} results, {arm}"
        report.rows.append((name, medians([one.figures for one in done])))
        report.raw[name] = [asdict(one) for one in done]
    for results in _RESULTS:
        alone = [one.rate for one in runs[results, _DIRECT]]
        for arm, bound in _BOUNDS.items():
            share = median_ratio([one.rate for one in runs[results, arm]], alone)
            what = f"{results} results, {arm}: tokens/s, of AsyncLLM alone"
            report.check(what, share, ">=", bound)
    report.plots.append(_plot(runs))
    return report


async def _measure(service: _Service, direct: _Direct, options: Options) -> Runs:
    runs: Runs = {}
    tokens = min(_TOKENS, int(_TOKENS_A_SECOND * options.seconds))
    sizes = [(results, tokens) for results in _RESULTS]
    for turn in range(-1, options.rounds):  # the first one warms up
        for results, length in sizes if turn >= 0 else [_WARM_UP]:
            for arm in (_DIRECT, _UNREAD, _READ):
                progress.show(f"{results} results, {arm}", turn, options.rounds)
                # The unread and the direct results have the same prompts.
                prompts = prompts_of(results, f"{arm == _READ:d}.{turn}")
                if arm == _DIRECT:
                    done = await direct.run(prompts, length)
                else:
                    done = await service.run(prompts, length, is_read=arm == _READ)
                if done.tokens != results * length:
                    raise RuntimeError(f"{done.tokens} tokens, not {results * length}")
                if turn >= 0:
                    runs.setdefault((results, arm), []).append(done)
    return runs


def _entry(directory: Path) -> Path:
    """An entry of the demo model's weights, which both engines read."""
    demo = _ROOT / "models" / "demo" / "1"
    engine = orjson.loads((demo / "model.json").read_bytes())
    own = {"model": str(demo), "kv_cache_memory_bytes": _CACHE_BYTES}
    (directory / "1").mkdir(parents=True)
    (directory / "1" / "model.json").write_bytes(orjson.dumps(engine | own))
    (directory / "config.pbtxt").write_text(CONFIG)
    return directory


@contextlib.asynccontextmanager
async def _service(house: House, entry: Path) -> AsyncIterator[_Service]:
    triton = EmbeddedTriton(
        _VENV,
        house.directory / "triton-t2",
        {_MODEL: entry},
        house.directory / "logs" / "triton-t2.log",
    )
    environment = await house.environment("bench_t2") | triton.environment
    progress.show("starting vLLM in Triton")
    await triton.start()
    try:
        async with house.api(environment, with_worker=True, model=_MODEL) as api:
            yield _Service(house, api)
    finally:
        await triton.stop()


@contextlib.asynccontextmanager
async def _direct(house: House, entry: Path) -> AsyncIterator[_Direct]:
    progress.show("starting vLLM alone")
    cores = len(os.sched_getaffinity(0))
    environment = os.environ | {  # as triton/serve.sh has it
        "PATH": f"{_VENV / 'bin'}:{os.environ['PATH']}",
        "LC_ALL": "C.UTF-8",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, cores - 1))),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
    }
    with (house.directory / "logs" / "vllm-alone.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(_VENV / "bin" / "python", "-P", _ROOT / "bench" / "direct_engine.py", entry / "1"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            env=environment,
            cwd=house.directory,
        )
    try:
        direct = _Direct(process)
        async with asyncio.timeout(_START_SECONDS):
            await direct.answer()
        yield direct
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()  # its engine dies with it
        await process.wait()


def _plot(runs: Runs) -> Bars:
    bars = [
        Bar(
            f"{results} results, {arm}",
            statistics.median(one.rate for one in done),
            is_ours=arm != _DIRECT,
        )
        for (results, arm), done in runs.items()
    ]
    return Bars("rate", "Tokens of real vLLM, results of 256 tokens", "tokens per second", bars)
