"""The dialects of batches together, and the parts that batches are processed with."""

from app.api.anthropic.batches_router import MessageBatches
from app.api.container import Services
from app.api.openai.batches_router import OpenAIBatches
from app.auth.principal import Principal
from app.batches.dialect import BatchDialect, BatchServices, LineRequest
from app.batches.rows import MESSAGES
from app.core.errors import ServiceError
from app.results.image_urls import refuse_urls


class BatchDialects:
    """The dialect of each endpoint, as one `BatchDialect`."""

    def __init__(self, services: Services) -> None:
        self._messages = MessageBatches(services)
        self._openai = OpenAIBatches(services)

    async def read(self, principal: Principal, endpoint: str, body: bytes) -> LineRequest:
        request = await self._of(endpoint).read(principal, endpoint, body)
        for prompt in request.group.prompts:
            refuse_urls(prompt.messages, "a batch")
        return request

    def refuse(self, endpoint: str, error: ServiceError) -> tuple[int, object]:
        return self._of(endpoint).refuse(endpoint, error)

    def _of(self, endpoint: str) -> BatchDialect:
        return self._messages if endpoint == MESSAGES else self._openai


def batch_services(services: Services) -> BatchServices:
    return BatchServices(
        services.settings,
        services.listener,
        services.batch_work,
        services.files,
        services.submissions,
        services.results,
        services.erasure,
        services.queue,
        BatchDialects(services),
    )
