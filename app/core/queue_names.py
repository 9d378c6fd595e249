"""Names of queues: a model's queue has the model's name, an index's queue has a prefix."""

# No model has it: Triton's model names are names of directories.
INDEX_QUEUES = "infini-gram/"


def queue_of(index: str) -> str:
    """The name of an index's queue: the `model_name` of its attributions."""
    return INDEX_QUEUES + index


def index_of(queue: str) -> str | None:
    """The index that a queue belongs to; None for a model's queue."""
    return queue.removeprefix(INDEX_QUEUES) if queue.startswith(INDEX_QUEUES) else None
