"""P10: results a second of a real vLLM that batches, and of one that runs a request after another.

One Triton has the committed demo model (5.5 million parameters, float32, on the CPU) twice: as
`make run` serves it, with vLLM's own bound on what runs at a time (128 on a CPU), and with
`max_num_seqs` 1. k6's virtual users call `POST /generate` of the service in front of both (API and
worker in one process, every result stored); each answer has 64 tokens, which its head proves. The
two take turns over several rounds, and only one has anything to do at a time: what the other one's
process uses meanwhile is told. A rate is of the whole run, its end included, where what is left no
longer fills a batch. k6 comes from `.venv-peers` (`make .venv-peers`).
"""

from dataclasses import asdict
from pathlib import Path

import orjson
import psutil

from app.cli.up.triton import STUB, EmbeddedTriton
from app.inference.model_repository import CONFIG
from bench import virtual_users
from bench.cpu import tree_seconds
from bench.report import Options, Report, median_ratio
from bench.servers import House, Server
from bench.virtual_users import COLUMNS, Summary

_BATCHING, _ONE = "demo", "demo-one"
_ARMS = {_BATCHING: "batching", _ONE: "one at a time"}
_USERS = (16, 64)
_TOKENS = 64
_PROMPT = "def "
_WARM_UP_SECONDS = 1.0
_GOAL = 5.0
_ROOT = Path(__file__).resolve().parents[1]
_MODELS = _ROOT / "models"


async def run(house: House, options: Options) -> Report:
    """Start both engines, and measure them in turn."""
    virtual_users.require()
    report = Report("P10", "continuous batching", [*COLUMNS, "tokens/s"])
    triton = EmbeddedTriton(
        _ROOT / ".venv-triton",
        house.directory / "triton-p10",
        {_BATCHING: _MODELS / _BATCHING, _ONE: _one_at_a_time(house.directory / _ONE)},
        house.directory / "logs" / "triton-p10.log",
    )
    environment = await house.environment("bench_p10") | triton.environment
    await triton.start()
    try:
        async with house.api(environment, with_worker=True, model=_ONE) as api:
            await _measure(house, api, options, report)
    finally:
        await triton.stop()
    return report


def _one_at_a_time(entry: Path) -> Path:
    """An entry of the demo model's weights that differs by `max_num_seqs` alone."""
    engine = orjson.loads((_MODELS / _BATCHING / "1" / "model.json").read_bytes())
    (entry / "1").mkdir(parents=True)
    (entry / "1" / "model.json").write_bytes(orjson.dumps(engine | {"max_num_seqs": 1}))
    (entry / "config.pbtxt").write_text(CONFIG)
    return entry


async def _measure(house: House, api: Server, options: Options, report: Report) -> None:
    found: dict[tuple[int, str], list[Summary]] = {}
    idle: list[float] = []

    async def load(users: int, model: str, seconds: float) -> Summary:
        given = {"MODEL": model, "PROMPT": _PROMPT, "TOKENS": str(_TOKENS), "FULL": "1"}
        return await virtual_users.run(
            "generate.js", house.directory, api.port, users, seconds, **given
        )

    for model in _ARMS:
        await load(min(_USERS), model, _WARM_UP_SECONDS)
    engines = _engines(house.directory / "triton-p10")
    for _ in range(options.rounds):
        for users in _USERS:
            for model in _ARMS:
                before = [tree_seconds(pid) for pid in engines]
                summary = await load(users, model, options.seconds)
                after = [tree_seconds(pid) for pid in engines]
                spent = min(end - begin for begin, end in zip(before, after, strict=True))
                idle.append(spent / (summary.answers / summary.rate))
                found.setdefault((users, model), []).append(summary)
    _add(report, found, max(idle))


def _engines(work: Path) -> list[int]:
    """The process of each model: its engine is in it, or below it."""
    found = [
        process.pid
        for process in psutil.Process().children(recursive=True)
        if process.exe().endswith(STUB) and process.cwd() == str(work)
    ]
    if len(found) != len(_ARMS):
        raise RuntimeError(f"{len(found)} engines run, not {len(_ARMS)}")
    return found


def _add(report: Report, found: dict[tuple[int, str], list[Summary]], idle: float) -> None:
    for (users, model), summaries in found.items():
        figures = virtual_users.median_figures(summaries)
        name = f"{_ARMS[model]}, {users} users"
        report.rows.append((name, [*figures, figures[-1] * _TOKENS]))
        report.raw[name] = [asdict(one) for one in summaries]
    for users in _USERS:
        batching, one = ([run.rate for run in found[users, model]] for model in _ARMS)
        ratio = median_ratio(batching, one)
        report.check(f"{users} users: results/s, of one at a time", ratio, ">=", _GOAL, "x")
    failed = sum(one.failed for summaries in found.values() for one in summaries)
    report.check("failed requests", failed, "<=", 0)
    report.notes.append(f"the engine that was not asked used {idle:.3f} of a core at most")
