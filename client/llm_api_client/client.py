"""The two clients: the same methods, blocking or awaited."""

from types import TracebackType

import httpx

from llm_api_client import config
from llm_api_client.driver import AsyncDriver, Driver
from llm_api_client.jobs.handles import async_handle, handle
from llm_api_client.jobs.start import open_job, start_map
from llm_api_client.methods import async_call, async_feed, call, feed
from llm_api_client.operations import (
    account,
    comparison,
    contexts,
    corpora,
    history,
    inference,
    jobs,
    results,
)
from llm_api_client.operations.results import ResultOrId, id_of
from llm_api_client.streams import AsyncStream, Stream

TIMEOUT_SECONDS = 60.0
PATIENCE_SECONDS = 60.0


class _Group:
    """Methods that share a client's connections."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver


class _AsyncGroup:
    """Methods that share a client's connections."""

    def __init__(self, driver: AsyncDriver) -> None:
        self.driver = driver


class Contexts(_Group):
    """Stored prompts."""

    create = call(contexts.create)
    get = call(contexts.get)
    list = feed(contexts.list_contexts)
    delete = call(contexts.delete)


class AsyncContexts(_AsyncGroup):
    """Stored prompts."""

    create = async_call(contexts.create)
    get = async_call(contexts.get)
    list = async_feed(contexts.list_contexts)
    delete = async_call(contexts.delete)


class Models(_Group):
    """Models of the service."""

    list = call(inference.list_models)
    get = call(inference.get_model)
    load = call(inference.load_model)
    unload = call(inference.unload_model)


class AsyncModels(_AsyncGroup):
    """Models of the service."""

    list = async_call(inference.list_models)
    get = async_call(inference.get_model)
    load = async_call(inference.load_model)
    unload = async_call(inference.unload_model)


class Attributions(_Group):
    """Attribution of texts to a corpus."""

    indexes = call(corpora.indexes)
    of_text = call(corpora.of_text)
    of_result = call(corpora.of_result)


class AsyncAttributions(_AsyncGroup):
    """Attribution of texts to a corpus."""

    indexes = async_call(corpora.indexes)
    of_text = async_call(corpora.of_text)
    of_result = async_call(corpora.of_result)


class Servers(_Group):
    """Triton servers; for operators."""

    list = call(inference.list_servers)
    get = call(inference.get_server)
    add = call(inference.add_server)
    drain = call(inference.drain_server)
    resume = call(inference.resume_server)
    remove = call(inference.remove_server)


class AsyncServers(_AsyncGroup):
    """Triton servers; for operators."""

    list = async_call(inference.list_servers)
    get = async_call(inference.get_server)
    add = async_call(inference.add_server)
    drain = async_call(inference.drain_server)
    resume = async_call(inference.resume_server)
    remove = async_call(inference.remove_server)


class Launches(_Group):
    """Servers that the service starts as jobs."""

    create = call(inference.create_launch)
    list = feed(inference.list_launches)
    get = call(inference.get_launch)
    log = call(inference.launch_log)
    stop = call(inference.stop_launch)
    delete = call(inference.delete_launch)
    profiles = call(inference.launch_profiles)


class AsyncLaunches(_AsyncGroup):
    """Servers that the service starts as jobs."""

    create = async_call(inference.create_launch)
    list = async_feed(inference.list_launches)
    get = async_call(inference.get_launch)
    log = async_call(inference.launch_log)
    stop = async_call(inference.stop_launch)
    delete = async_call(inference.delete_launch)
    profiles = async_call(inference.launch_profiles)


class Webhooks(_Group):
    """Secret and deliveries of the team's webhooks."""

    secret = call(account.secret)
    rotate_secret = call(account.rotate_secret)
    deliveries = feed(account.deliveries)
    redeliver = call(account.redeliver)


class AsyncWebhooks(_AsyncGroup):
    """Secret and deliveries of the team's webhooks."""

    secret = async_call(account.secret)
    rotate_secret = async_call(account.rotate_secret)
    deliveries = async_feed(account.deliveries)
    redeliver = async_call(account.redeliver)


class Jobs(_Group):
    """Jobs of the team: data sets that `map` sends."""

    create = call(jobs.create)
    get = call(jobs.get)
    wait = call(jobs.wait)
    list = feed(jobs.list_jobs)
    close = call(jobs.close)
    open = call(jobs.open_again)
    cancel = call(jobs.cancel)
    retry_failed = call(jobs.retry_failed)
    delete = call(jobs.delete)


class AsyncJobs(_AsyncGroup):
    """Jobs of the team: data sets that `map` sends."""

    create = async_call(jobs.create)
    get = async_call(jobs.get)
    wait = async_call(jobs.wait)
    list = async_feed(jobs.list_jobs)
    close = async_call(jobs.close)
    open = async_call(jobs.open_again)
    cancel = async_call(jobs.cancel)
    retry_failed = async_call(jobs.retry_failed)
    delete = async_call(jobs.delete)


class Client:
    """A client whose methods return when the work is done. Threads may share one.

    Args:
        url: of the service; default: `LLM_API_URL`, the last `llm-api login`, or http://127.0.0.1:8887.
        key: API key or JWT; default: `LLM_API_KEY`, or that of the last login at this URL.
        timeout: seconds without a byte after which a connection counts as lost.
        patience: seconds for which a lost or refused request is repeated, with growing pauses that
            honour `Retry-After`; 0: never. A stream counts from its last event.
        allow_http: send the key to another host than this one over plain http (`LLM_API_ALLOW_HTTP=1`).
        transport: of httpx, for proxies, client certificates and tests.

    Raises:
        ConfigurationError: the URL or the key cannot be used, or the key would be readable on the way.
    """

    def __init__(
        self,
        url: str | None = None,
        key: str | None = None,
        *,
        timeout: float = TIMEOUT_SECONDS,
        patience: float = PATIENCE_SECONDS,
        allow_http: bool = False,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.endpoint = config.resolve(url, key, allow_http=allow_http)
        self.driver = driver = Driver(self.endpoint, timeout, patience, transport)
        self.contexts = Contexts(driver)
        self.models = Models(driver)
        self.attributions = Attributions(driver)
        self.servers = Servers(driver)
        self.launches = Launches(driver)
        self.webhooks = Webhooks(driver)
        self.jobs = Jobs(driver)

    send = call(results.send)
    send_many = call(results.send_many)
    get = call(results.get)
    wait = call(results.wait)
    compare = call(comparison.compare)
    cancel = call(results.cancel)
    cancel_all = call(results.cancel_all)
    retry = call(results.retry)
    delete = call(results.delete)
    attempts = call(results.attempts)
    list = feed(history.list_results)
    search = feed(history.search)
    export = feed(history.export)
    me = call(account.me)
    map = handle(start_map)
    job = handle(open_job)

    def stream(self, result: ResultOrId) -> Stream:
        """Read the text of a result as it is generated; a result or its id.

        The stream resumes by itself after a broken connection or a restart of the service.
        """
        return Stream(self.driver, id_of(result))

    def close(self) -> None:
        """Close the connections."""
        self.driver.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Client({self.endpoint.url!r})"


class AsyncClient:
    """A client whose methods are awaited, for one event loop. Arguments and methods as of Client."""

    def __init__(
        self,
        url: str | None = None,
        key: str | None = None,
        *,
        timeout: float = TIMEOUT_SECONDS,
        patience: float = PATIENCE_SECONDS,
        allow_http: bool = False,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.endpoint = config.resolve(url, key, allow_http=allow_http)
        self.driver = driver = AsyncDriver(self.endpoint, timeout, patience, transport)
        self.contexts = AsyncContexts(driver)
        self.models = AsyncModels(driver)
        self.attributions = AsyncAttributions(driver)
        self.servers = AsyncServers(driver)
        self.launches = AsyncLaunches(driver)
        self.webhooks = AsyncWebhooks(driver)
        self.jobs = AsyncJobs(driver)

    send = async_call(results.send)
    send_many = async_call(results.send_many)
    get = async_call(results.get)
    wait = async_call(results.wait)
    compare = async_call(comparison.compare)
    cancel = async_call(results.cancel)
    cancel_all = async_call(results.cancel_all)
    retry = async_call(results.retry)
    delete = async_call(results.delete)
    attempts = async_call(results.attempts)
    list = async_feed(history.list_results)
    search = async_feed(history.search)
    export = async_feed(history.export)
    me = async_call(account.me)
    map = async_handle(start_map)
    job = async_handle(open_job)

    def stream(self, result: ResultOrId) -> AsyncStream:
        """Read the text of a result as it is generated; a result or its id.

        The stream resumes by itself after a broken connection or a restart of the service.
        """
        return AsyncStream(self.driver, id_of(result))

    async def close(self) -> None:
        """Close the connections."""
        await self.driver.close()

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"AsyncClient({self.endpoint.url!r})"
