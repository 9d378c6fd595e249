"""Fit of a model on GPUs: weights, overhead of computing, and the cache in the remaining memory.

    budget   = GPU memory * utilization
    cache    = budget - weights - overhead
    requests = blocks in the cache / blocks of one request

`plan` is the entry point: for each kind of GPU the smallest number of GPUs that is enough. Several nodes
are stages of a pipeline: each has a part of the layers, which its GPUs share.
"""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from app.provisioning.sizing.cache import CacheShape
from app.provisioning.sizing.facts import DTYPE_BYTES, GIB, ModelFacts, PlanError
from app.provisioning.sizing.gpus import GPUS, Gpu
from app.provisioning.sizing.resources import MAX_NODES, Resources, resources_for
from app.provisioning.sizing.weights import disk_bytes, weight_bytes, with_quantization

# The default of the longest sequence, as of `python -m app up --model`.
DEFAULT_CONTEXT = 4096
MAX_CONTEXT = 1 << 31
MAX_CONCURRENCY = 1_000_000
MAX_GPUS = 1024
MAX_BATCH = 1 << 24
MAX_MINUTES = 525_600
# Memory of a CUDA context, of kernels' workspaces and CUDA graphs; and of NCCL among GPUs.
FIXED_OVERHEAD = 1 * GIB
SHARED_OVERHEAD = 1 * GIB
# Sampling holds a request's logits about four times, in 32 bits.
LOGIT_BYTES = 16
# The possible error of the overhead: a model with less to spare is reported to fit tightly.
TIGHT_BYTES = 1 * GIB


@dataclass(frozen=True, slots=True)
class Engine:
    """Settings of vLLM that determine memory, under its own names.

    The defaults are those of an engine inside Triton. `dtype` None: the model's. `kv_cache_dtype`:
    "auto" is the model's, too, else "fp8". `max_gpus`: most GPUs of a node. `max_nodes`: most nodes, which are taken only where one
    is not enough.
    """

    dtype: str | None = None
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    gpu_memory_utilization: float = 0.9
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 128
    max_gpus: int = 8
    max_nodes: int = 1


@dataclass(frozen=True, slots=True)
class Plan:
    """A model on `gpus` GPUs of one kind on each of `nodes`. Sizes are bytes on each GPU of the fullest node.

    `cache` is negative by the memory that weights and overhead lack. `token_bytes`: of the cache, for
    one token (sliding windows aside). `tokens`, `requests`: the cache's capacity at the same time, in
    requests of `context` tokens (prompt and output). `verdict` begins with "fits", or names the
    lack. `resources`: to request from a scheduler, if it fits.
    """

    gpu: Gpu
    nodes: int
    gpus: int
    context: int
    concurrency: int
    dtype: str
    weights: int
    overhead: int
    cache: int
    token_bytes: int
    tokens: int
    requests: float
    fits: bool
    verdict: str
    resources: Resources | None


def plan(
    facts: ModelFacts,
    gpus: Iterable[Gpu] = tuple(GPUS.values()),
    context: int | None = None,
    concurrency: int = 1,
    engine: Engine | None = None,
    serve_minutes: int = 60,
) -> list[Plan]:
    """For each kind of GPU the fewest nodes and GPUs that are enough; else the most, and the lack.

    `context` None: the model's longest sequence, but at most DEFAULT_CONTEXT. Raises PlanError for
    requests that no GPU could satisfy: a context beyond the model's, a second quantization, a number below 1.
    """
    asked = _validated_request(facts, context, concurrency, engine or Engine(), serve_minutes)
    return [_smallest(asked, gpu) for gpu in gpus]


def plan_on(
    facts: ModelFacts,
    gpu: Gpu,
    gpus: int,
    context: int | None = None,
    concurrency: int = 1,
    engine: Engine | None = None,
    serve_minutes: int = 60,
    nodes: int = 1,
) -> Plan:
    """The model on so many `gpus` of each of `nodes`. Raises PlanError."""
    asked = _validated_request(facts, context, concurrency, engine or Engine(), serve_minutes)
    _check("gpus", gpus, MAX_GPUS)
    _check("nodes", nodes, min(MAX_NODES, facts.layers))
    return _on(asked, gpu, gpus, nodes)


def cache_shape(
    facts: ModelFacts, gpus: int, dtype: str, engine: Engine, nodes: int = 1
) -> CacheShape:
    element = 1 if engine.kv_cache_dtype == "fp8" else facts.kv_bytes or DTYPE_BYTES[dtype]
    # vLLM prepares the next step while the last one runs, and each stage has a batch: as many are in progress.
    in_flight = max(2, nodes) * engine.max_num_batched_tokens
    return CacheShape(facts, gpus, element, in_flight, stages=nodes)


@dataclass(frozen=True, slots=True)
class _Request:
    facts: ModelFacts
    context: int
    concurrency: int
    engine: Engine
    serve_minutes: int


def _smallest(asked: _Request, gpu: Gpu) -> Plan:
    tried = _on(asked, gpu, 1)
    gpus = 2
    while not tried.fits and gpus <= asked.engine.max_gpus:
        if not _undivided(asked.facts, gpus):
            tried = _on(asked, gpu, gpus)
        gpus *= 2
    if not tried.fits and not _dtype(asked.facts, gpu, asked.engine)[1]:
        # More nodes only where a whole one is not enough: what GPUs of a node exchange is faster.
        for nodes in range(2, min(asked.engine.max_nodes, asked.facts.layers) + 1):
            tried = _on(asked, gpu, tried.gpus, nodes)
            if tried.fits:
                break
    return tried


def _on(asked: _Request, gpu: Gpu, gpus: int, nodes: int = 1) -> Plan:
    facts, engine = asked.facts, asked.engine
    dtype, refusal = _dtype(facts, gpu, engine)
    weights = _share(facts, weight_bytes(facts, dtype), gpus)
    if nodes > 1:
        weights = _stage(facts, weights, DTYPE_BYTES[dtype] / gpus, nodes)
    overhead = _overhead(facts, gpus, DTYPE_BYTES[dtype], engine, is_shared=gpus * nodes > 1)
    cache = int(gpu.memory * engine.gpu_memory_utilization) - weights - overhead
    shape = cache_shape(facts, gpus, dtype, engine, nodes)
    requests = shape.requests(cache, asked.context)
    missing = refusal or _undivided(facts, gpus)
    missing = missing or _shortage(asked, shape, cache, requests, overhead > weights)
    return Plan(
        gpu=gpu,
        nodes=nodes,
        gpus=gpus,
        context=asked.context,
        concurrency=asked.concurrency,
        dtype=dtype,
        weights=weights,
        overhead=overhead,
        cache=cache,
        token_bytes=shape.token_bytes,
        tokens=shape.tokens(cache, asked.context),
        requests=requests,
        fits=not missing,
        verdict=missing or _fit_verdict(asked, gpu, dtype, cache, shape),
        resources=None
        if missing
        else resources_for(disk_bytes(facts), gpus, asked.serve_minutes, nodes),
    )


# --- Request --------------------------------------------------------------------------------------


def _validated_request(
    facts: ModelFacts, context: int | None, concurrency: int, engine: Engine, serve_minutes: int
) -> _Request:
    _check("concurrency", concurrency, MAX_CONCURRENCY)
    _check("max_gpus", engine.max_gpus, MAX_GPUS)
    _check("max_nodes", engine.max_nodes, MAX_NODES)
    _check("max_num_batched_tokens", engine.max_num_batched_tokens, MAX_BATCH)
    _check("max_num_seqs", engine.max_num_seqs, MAX_CONCURRENCY)
    _check("serve_minutes", serve_minutes, MAX_MINUTES)
    if not 0 < engine.gpu_memory_utilization <= 1:
        raise PlanError(
            "gpu_memory_utilization: must be above 0, and at most 1 (for example 0.9), "
            f"not {engine.gpu_memory_utilization!r:.40}"
        )
    _check_name("kv_cache_dtype", engine.kv_cache_dtype, ("auto", "fp8"))
    _check_name("dtype", engine.dtype, DTYPE_BYTES)
    # The engine must allow all requests that are to run at the same time.
    engine = dataclasses.replace(engine, max_num_seqs=max(engine.max_num_seqs, concurrency))
    facts = with_quantization(facts, engine.quantization)
    return _Request(facts, _context(facts, context), concurrency, engine, serve_minutes)


def _context(facts: ModelFacts, context: int | None) -> int:
    if context is None:
        return min(facts.max_context or DEFAULT_CONTEXT, DEFAULT_CONTEXT)
    _check("context", context, MAX_CONTEXT)
    if facts.max_context and context > facts.max_context:
        raise PlanError(
            f"context: {context} tokens are more than the model's {facts.max_context} "
            "(max_position_embeddings)"
        )
    return context


def _check(name: str, value: int, high: int) -> None:
    if type(value) is not int or not 1 <= value <= high:
        raise PlanError(f"{name}: must be a whole number from 1 to {high}, not {value!r:.40}")


def _check_name(name: str, value: str | None, known: Iterable[str]) -> None:
    if value is not None and value not in known:
        raise PlanError(f"{name}: must be one of {', '.join(known)}, not {value[:40]!r}")


def _dtype(facts: ModelFacts, gpu: Gpu, engine: Engine) -> tuple[str, str]:
    """The type that the model runs in on this GPU, and the reason if it cannot run."""
    dtype = engine.dtype or facts.dtype
    if engine.dtype is None and dtype == "float32":
        dtype = "bfloat16"  # vLLM's --dtype auto
    if dtype == "bfloat16" and not gpu.has_bfloat16:
        if engine.dtype:
            return dtype, "has no bfloat16: take --dtype float16"
        dtype = "float16"
    quantization = facts.quantization
    if quantization and gpu.capability < quantization.capability:
        least = ".".join(map(str, quantization.capability))
        return dtype, f"cannot run {quantization.method}: it needs compute capability {least}"
    return dtype, ""


# --- Memory --------------------------------------------------------------------------------------------


def _share(facts: ModelFacts, total: int, gpus: int) -> int:
    heads = min(gpus, facts.kv_heads)
    divided = facts.parameters - facts.replicated_parameters - facts.kv_parameters
    held = divided / gpus + facts.replicated_parameters + facts.kv_parameters / heads
    return int(total * held / facts.parameters)


def _stage(facts: ModelFacts, weights: int, element_bytes: float, stages: int) -> int:
    """The part of a GPU's `weights` in the fullest stage: most layers, and a table of the vocabulary.

    The first stage has the embeddings, the last one the output head; `element_bytes` are a GPU's part of
    an element of these.
    """
    table = facts.vocab_size * facts.hidden_size
    tables = (facts.parameters - facts.linear_parameters - facts.expert_parameters) // table
    layers = weights - int(tables * table * element_bytes)
    most = -(-facts.layers // stages) / facts.layers
    return int(layers * most + table * element_bytes)


def _overhead(
    facts: ModelFacts, gpus: int, element: int, engine: Engine, *, is_shared: bool
) -> int:
    width = 2 * facts.hidden_size + facts.mlp_elements // gpus
    activations = engine.max_num_batched_tokens * width * element
    logits = engine.max_num_seqs * facts.vocab_size * LOGIT_BYTES
    return activations + logits + FIXED_OVERHEAD + (SHARED_OVERHEAD if is_shared else 0)


def _shortage(
    asked: _Request, shape: CacheShape, cache: int, requests: float, is_mostly_overhead: bool
) -> str:
    """The reason why it does not fit, for people; "" if it fits."""
    context, twice = asked.context, 2 * shape.gpus
    if requests >= asked.concurrency:
        return ""
    if cache <= 0:
        what = f"lacks {-cache / GIB:.1f} GiB per GPU for weights and overhead"
        # Fewer requests than the engine may run anyway change nothing.
        if is_mostly_overhead and asked.concurrency == asked.engine.max_num_seqs:
            what += ": request a lower concurrency"
    elif requests < 1:
        lacking = (shape.request_bytes(context) - cache) / GIB
        what = f"lacks {lacking:.1f} GiB per GPU for one request of {context} tokens"
    else:
        what = f"holds {int(requests)} of {asked.concurrency} requests of {context} tokens"
    if twice <= asked.engine.max_gpus and (reason := _undivided(asked.facts, twice)):
        what += f"; {reason}"
    return what


def _fit_verdict(asked: _Request, gpu: Gpu, dtype: str, cache: int, shape: CacheShape) -> str:
    spare = cache - asked.concurrency * shape.request_bytes(asked.context)
    fits = "fits tightly" if spare < TIGHT_BYTES else "fits"
    return fits if gpu.has_bfloat16 else f"{fits}, in {dtype}"


def _undivided(facts: ModelFacts, gpus: int) -> str:
    """The reason why so many GPUs cannot share the model; "" if they can.

    vLLM divides heads evenly; it divides key-value heads evenly or replicates them evenly; and it never
    divides a group of weights with one scale.
    """
    if facts.attention_heads % gpus:
        return f"{gpus} GPUs cannot share {facts.attention_heads} attention heads"
    if not facts.is_latent and facts.kv_heads % gpus and gpus % facts.kv_heads:
        return f"{gpus} GPUs cannot share {facts.kv_heads} key-value heads"
    group = facts.quantization.group if facts.quantization else 1
    for size in facts.inner_sizes if gpus > 1 else ():
        if size % gpus or size // gpus % group:
            within = f" in groups of {group}" if group > 1 else ""
            return f"{gpus} GPUs cannot share an inner width of {size}{within}"
    return ""
