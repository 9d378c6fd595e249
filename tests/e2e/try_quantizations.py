"""Load a model with each quantization: `python try_quantizations.py MODEL NAME...`.

Runs in Triton's environment. Prints a line `name yes` or `name no` for each, after
the names that vLLM has.
"""

import sys

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS


def works(model: str, quantization: str) -> bool:
    """Return True if a token is generated; the reason of a failure goes to standard error."""
    try:
        engine = LLM(
            model=model,
            quantization=quantization,
            enforce_eager=True,
            kv_cache_memory_bytes=8 << 20,
            max_model_len=128,
            dtype="float16",  # bfloat16 needs AMX tiles, which the kernel may not have granted
        )
        one_token = SamplingParams(max_tokens=1, temperature=0)
        return len(engine.generate(["a"], one_token)[0].outputs[0].token_ids) == 1
    except Exception as error:  # noqa: BLE001 - vLLM's errors are of every kind
        sys.stderr.write(f"{quantization}: {error!r}\n")
        return False
    finally:
        cleanup_dist_env_and_memory()


if __name__ == "__main__":
    sys.stdout.write(f"known {' '.join(QUANTIZATION_METHODS)}\n")
    for name in sys.argv[2:]:
        sys.stdout.write(f"{name} {'yes' if works(sys.argv[1], name) else 'no'}\n")
