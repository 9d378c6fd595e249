"""The least that a generation needs: a gRPC client in a closed loop, and nothing else.

    python -m bench.bare_client HOST:PORT CALLERS SECONDS PROMPT...

with the server's secret in LLM_TRITON_SECRET prints one JSON object: generations in the time asked for and in all, and its own CPU seconds.
"""

import asyncio
import itertools
import os
import resource
import sys
import time
from collections.abc import Sequence

import grpc
import orjson
import uvloop
from tritonclient.grpc import service_pb2

from app.inference.triton_access import grpc_headers
from app.inference.triton_messages import build_request
from bench.servers import MODEL

PARAMETERS = {"max_tokens": 16, "temperature": 0}
_WARM_UP_SECONDS = 0.5


async def main(
    address: str, callers: int, seconds: float, prompts: Sequence[str]
) -> dict[str, float]:
    """Warm up, then generate for so many seconds."""
    async with grpc.aio.insecure_channel(address) as channel:
        # As the service does: one message, sent with the end of the stream.
        infer = channel.unary_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer",
            request_serializer=service_pb2.ModelInferRequest.SerializeToString,
            response_deserializer=service_pb2.ModelStreamInferResponse.FromString,
        )
        await _generate(infer, callers, _WARM_UP_SECONDS, prompts)
        before = _cpu_seconds()
        count, in_time = await _generate(infer, callers, seconds, prompts)
        return {"count": count, "rate": in_time / seconds, "cpu": _cpu_seconds() - before}


async def _generate(
    infer: grpc.aio.UnaryStreamMultiCallable, callers: int, seconds: float, prompts: Sequence[str]
) -> tuple[int, int]:
    """Generations in all, and those that ended in time."""
    ends = time.perf_counter() + seconds
    count = in_time = 0
    in_turn = itertools.cycle(prompts)
    headers = grpc_headers(os.environ.get("LLM_TRITON_SECRET"))

    async def call() -> None:
        nonlocal count, in_time
        while time.perf_counter() < ends:
            pieces = []
            request = build_request(MODEL, next(in_turn), PARAMETERS)
            async for answer in infer(request, metadata=headers):
                if answer.error_message:
                    raise RuntimeError(answer.error_message)
                pieces.append(answer.infer_response.raw_output_contents[0][4:].decode())
            if not pieces:
                raise RuntimeError("no answer")
            count += 1
            in_time += time.perf_counter() < ends

    await asyncio.gather(*(call() for _ in range(callers)))
    return count, in_time


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    address, callers, seconds, *prompts = sys.argv[1:]
    result = uvloop.run(main(address, int(callers), float(seconds), prompts))
    sys.stdout.buffer.write(orjson.dumps(result))
