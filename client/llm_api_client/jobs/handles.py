"""Jobs as objects: iterate over their rows, run them to their end, retry, cancel."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Concatenate, Generic, ParamSpec

from llm_api_client.driver import AsyncDriver, Driver
from llm_api_client.jobs.mapping import PATIENCE_SECONDS, Course
from llm_api_client.jobs.records import JobInfo, RetriedRows, Row, Value
from llm_api_client.methods import Awaiting, Blocking, present
from llm_api_client.operations import jobs
from llm_api_client.steps import Call, Emit, Feed

P = ParamSpec("P")


def failed_rows(course: Course[Value]) -> Feed[Row[Value]]:
    """The failed rows of a job, from the service."""
    after = 0
    while page := (yield from jobs.ended_rows(course.job_id, after=after, state="failed")):
        for row in page:
            yield Emit(course.read(row))
        after = page[-1].place


class Job(Generic[Value]):
    """A job of the service: iterate over it to send its rows and to receive those that end.

    A loop that is left early continues in the next one. The service keeps working without this process.
    """

    def __init__(self, driver: Driver, course: Course[Value]) -> None:
        self._driver, self._course = driver, course

    @property
    def id(self) -> str:
        """The job's id, for `client.job(id)` on any machine."""
        return self._course.job_id

    def __iter__(self) -> Iterator[Row[Value]]:
        patience = max(PATIENCE_SECONDS, self._driver.patience)
        return self._driver.iterate(self._course.rows(), patience)

    def run(self) -> JobInfo:
        """Send and read to the end of the job, and return its counts; with `out`, write the answers."""
        for _ in self:
            pass
        return self.info()

    def info(self) -> JobInfo:
        """The state and the counts of the job."""
        return self._driver.run(jobs.get(self.id))

    def wait(self, timeout: float | None = None) -> JobInfo:
        """Wait until all rows that the service has have ended, and the job is closed; it reads no row.

        Raises:
            WaitTimeoutError: it did not end in that time, and continues.
        """
        return self._driver.run(jobs.wait(self.id, timeout))

    def failed(self) -> Iterator[Row[Value]]:
        """The rows that failed, with their errors."""
        return self._driver.iterate(failed_rows(self._course))

    def retry_failed(self, *, error_code: str | None = None) -> RetriedRows:
        """Send the failed rows again, or those with one error; then iterate or `run` again."""
        return self._driver.run(jobs.retry_failed(self.id, error_code=error_code))

    def cancel(self) -> JobInfo:
        """Cancel the rows that have not ended; they are failed rows, which can be retried."""
        return self._driver.run(jobs.cancel(self.id))

    def _repr_html_(self) -> str:
        return self.info()._repr_html_()

    def __repr__(self) -> str:
        return f"Job({self.id!r})"


class AsyncJob(Generic[Value]):
    """As Job, with `async for` and `await`."""

    def __init__(self, driver: AsyncDriver, course: Course[Value]) -> None:
        self._driver, self._course = driver, course

    @property
    def id(self) -> str:
        """The job's id, for `client.job(id)` on any machine."""
        return self._course.job_id

    def __aiter__(self) -> AsyncIterator[Row[Value]]:
        patience = max(PATIENCE_SECONDS, self._driver.patience)
        return self._driver.iterate(self._course.rows(), patience)

    async def run(self) -> JobInfo:
        """Send and read to the end of the job, and return its counts; with `out`, write the answers."""
        async for _ in self:
            pass
        return await self.info()

    async def info(self) -> JobInfo:
        """The state and the counts of the job."""
        return await self._driver.run(jobs.get(self.id))

    async def wait(self, timeout: float | None = None) -> JobInfo:
        """Wait until all rows that the service has have ended, and the job is closed; it reads no row.

        Raises:
            WaitTimeoutError: it did not end in that time, and continues.
        """
        return await self._driver.run(jobs.wait(self.id, timeout))

    def failed(self) -> AsyncIterator[Row[Value]]:
        """The rows that failed, with their errors."""
        return self._driver.iterate(failed_rows(self._course))

    async def retry_failed(self, *, error_code: str | None = None) -> RetriedRows:
        """Send the failed rows again, or those with one error; then iterate or `run` again."""
        return await self._driver.run(jobs.retry_failed(self.id, error_code=error_code))

    async def cancel(self) -> JobInfo:
        """Cancel the rows that have not ended; they are failed rows, which can be retried."""
        return await self._driver.run(jobs.cancel(self.id))

    def __repr__(self) -> str:
        return f"AsyncJob({self.id!r})"


def handle(
    start: Callable[P, Call[Course[Value]]],
) -> Callable[Concatenate[Blocking, P], Job[Value]]:
    """A method that starts or opens a job."""

    def method(self: Blocking, /, *args: P.args, **kwargs: P.kwargs) -> Job[Value]:
        return Job(self.driver, self.driver.run(start(*args, **kwargs)))

    return present(method, start, Job)


def async_handle(
    start: Callable[P, Call[Course[Value]]],
) -> Callable[Concatenate[Awaiting, P], Awaitable[AsyncJob[Value]]]:
    """As `handle`, to be awaited."""

    async def method(self: Awaiting, /, *args: P.args, **kwargs: P.kwargs) -> AsyncJob[Value]:
        return AsyncJob(self.driver, await self.driver.run(start(*args, **kwargs)))

    return present(method, start, AsyncJob)
