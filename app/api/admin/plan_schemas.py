"""Wire schema of a plan: the GPUs that fit a model."""

from typing import Any

from pydantic import BaseModel, Field


class PlannedModelRead(BaseModel):
    """Properties of a model, read from its config.json."""

    model_type: str = Field(description="Its architecture, as config.json names it.")
    is_known: bool = Field(description="Whether the count is made for this architecture.")
    parameters: int
    active_parameters: int = Field(description="Parameters that compute one token.")
    layers: int
    dtype: str
    quantization: str | None
    max_context: int | None = Field(description="Most tokens of a sequence.")
    disk_bytes: int = Field(description="Bytes of the weights on disk.")
    notes: list[str] = Field(description="Limits and assumptions of the figures.")


class PlannedResourcesRead(BaseModel):
    """Resources to request from a scheduler, on each node."""

    nodes: int
    gpus: int
    gres: str
    cpu_cores: int
    memory_gb: int = Field(description="Host memory, 10^9 bytes.")
    minutes: int = Field(description="With the loading of the weights.")


class GpuPlanRead(BaseModel):
    """A model on GPUs of one kind: the smallest count that fits, or the largest. Sizes are per GPU."""

    gpu: str
    title: str
    nodes: int = Field(description="More than one only up to the request's `max_nodes`.")
    gpus: int = Field(description="On each node.")
    context: int
    concurrency: int
    dtype: str
    weights_bytes: int
    overhead_bytes: int
    cache_bytes: int = Field(description="Below 0: bytes missing for weights and overhead.")
    cache_bytes_per_token: int
    cache_tokens: int = Field(description="Tokens that the cache holds at a time.")
    cache_requests: float = Field(description="Requests that the cache holds at a time.")
    fits: bool
    verdict: str = Field(description="`fits`, perhaps tightly; or the missing memory.")
    resources: PlannedResourcesRead | None = Field(description="Where it fits.")


class PlanRead(BaseModel):
    """A model, and its plan for each kind of GPU."""

    model: PlannedModelRead
    plans: list[GpuPlanRead]


# Members of Llama 3 8B's config.json.
EXAMPLE: dict[str, Any] = {
    "config": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "torch_dtype": "bfloat16",
    },
    "gpus": ["l4", "a100-80"],
    "context": 8192,
    "concurrency": 16,
}
