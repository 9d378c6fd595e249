"""Client of the LLM API Service: send prompts, keep and stream results."""

from llm_api_client.client import AsyncClient, Client
from llm_api_client.driver import __version__
from llm_api_client.errors import (
    APIStatusError,
    AuthenticationError,
    ConfigurationError,
    ConflictError,
    ConnectionFailedError,
    InvalidRequestError,
    LimitReachedError,
    LLMAPIError,
    NotFoundError,
    PermissionDeniedError,
    ResultFailedError,
    ServiceUnavailableError,
    WaitTimeoutError,
    WebhookSignatureError,
)
from llm_api_client.jobs.handles import AsyncJob, Job
from llm_api_client.jobs.output import OutputError
from llm_api_client.jobs.records import JobInfo, Row, RowFailedError
from llm_api_client.operations.streams import StreamEvent
from llm_api_client.schemas import (
    Attempt,
    Attribution,
    Caller,
    Comparison,
    Context,
    Delivery,
    Launch,
    Model,
    Result,
    Server,
)
from llm_api_client.streams import AsyncStream, Stream
from llm_api_client.webhooks import WebhookEvent, verify_webhook

__all__ = [
    "APIStatusError",
    "AsyncClient",
    "AsyncJob",
    "AsyncStream",
    "Attempt",
    "Attribution",
    "AuthenticationError",
    "Caller",
    "Client",
    "Comparison",
    "ConfigurationError",
    "ConflictError",
    "ConnectionFailedError",
    "Context",
    "Delivery",
    "InvalidRequestError",
    "Job",
    "JobInfo",
    "LLMAPIError",
    "Launch",
    "LimitReachedError",
    "Model",
    "NotFoundError",
    "OutputError",
    "PermissionDeniedError",
    "Result",
    "ResultFailedError",
    "Row",
    "RowFailedError",
    "Server",
    "ServiceUnavailableError",
    "Stream",
    "StreamEvent",
    "WaitTimeoutError",
    "WebhookEvent",
    "WebhookSignatureError",
    "__version__",
    "verify_webhook",
]  # fmt: skip
