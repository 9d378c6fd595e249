"""vLLM's AsyncLLM without Triton and without the service: the baseline of T2. Runs in `.venv-triton`.

    .venv-triton/bin/python -P bench/direct_engine.py MODEL_DIRECTORY

starts the engine with the arguments of the directory's model.json, by the code of the backend. It prints
a line of JSON when the engine is ready, and then one for each line of input: {"prompts", "tokens"} has
it generate so many tokens for all prompts at the same time; the answer is {"seconds", "tokens"}.
"""

import asyncio
import itertools
import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "triton" / "backends" / "vllm"))

from engine_host import EngineHost  # type: ignore[import-not-found]
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

_NUMBERS = itertools.count()


async def generate_all(engine: AsyncLLM, prompts: list[str], tokens: int) -> dict[str, float]:
    """Generate for all prompts at the same time; the seconds until the last end, and the tokens."""
    began = time.perf_counter()
    counts = await asyncio.gather(*(_generate(engine, prompt, tokens) for prompt in prompts))
    return {"seconds": time.perf_counter() - began, "tokens": sum(counts)}


async def _generate(engine: AsyncLLM, prompt: str, tokens: int) -> int:
    sampling = SamplingParams(
        max_tokens=tokens, temperature=0, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    count = 0
    async for output in engine.generate(prompt, sampling, str(next(_NUMBERS))):
        count += len(output.outputs[0].token_ids)
    return count


def main(model_directory: str) -> None:
    """Answer line by line, to the end of the input."""
    # vLLM logs to stdout.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    host = EngineHost(model_directory)
    print(json.dumps("ready"), file=answers)
    for line in sys.stdin:
        done = generate_all(host.engine, **json.loads(line))
        print(json.dumps(asyncio.run_coroutine_threadsafe(done, host.loop).result()), file=answers)
    host.close()


if __name__ == "__main__":
    main(sys.argv[1])
