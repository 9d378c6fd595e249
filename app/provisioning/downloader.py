"""Runs downloads of models from their row to their end: a part of a worker process.

The host keeps what it has received. So a download whose worker dies is claimed by another one after its
lease, and continues. The host refuses a download while another one of the model runs, such as that of a
worker that is frozen: it is tried again.
"""

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass

from app.core.database import Database, is_transient
from app.core.errors import DatabaseUnavailableError
from app.core.listener import LAUNCHES, Listener
from app.core.polling import PollingLoop
from app.core.settings import Settings
from app.core.waiting import cancel_all
from app.provisioning.download_store import DownloadStore, ModelDownload
from app.provisioning.hosts import HostError, Hosts
from app.provisioning.hub_token import HubToken, HubTokenError
from app.provisioning.model_download import (
    Downloaded,
    ModelDownloadError,
    ModelUnavailableError,
    download_model,
)
from app.provisioning.profiles import Profile

logger = logging.getLogger(__name__)

_MAX_AT_ONCE = 2  # downloads that one process runs at the same time
_RENEW_SECONDS = 2.0
_RELEASE_SECONDS = 5.0
_MAX_POLL_SECONDS = 15.0
_BUG = "a bug in the service; its worker's log has the details"
_UNREADABLE = "the stored token cannot be read; the worker's log has the reason"


@dataclass(slots=True)
class _Progress:
    done: int = 0
    total: int | None = None

    def report(self, done: int, total: int) -> None:
        if total:  # none while the files are listed
            self.done, self.total = done, total


class Downloader:
    """Runs the downloads to some profiles until cancelled. One instance per process."""

    def __init__(
        self,
        database: Database,
        listener: Listener,
        settings: Settings,
        profiles: dict[str, Profile],
    ) -> None:
        self._store = DownloadStore(database)
        self._settings = settings
        self._profiles = profiles
        self._lease = settings.launch_lease_seconds
        self._pause = min(_RENEW_SECONDS, self._lease / 5)
        self._hosts = Hosts()
        self._running: set[asyncio.Task[None]] = set()
        self._loop = PollingLoop(
            "downloads",
            self._start_due,
            seconds=min(settings.launch_poll_seconds, _MAX_POLL_SECONDS),
        )
        listener.subscribe(LAUNCHES, lambda _: self._loop.wake())

    async def run(self) -> None:
        """Run until cancelled; another worker continues those that run, after their leases."""
        async with self._hosts:
            try:
                await self._loop.run()
            finally:
                await cancel_all(self._running)

    async def _start_due(self) -> None:
        while len(self._running) < _MAX_AT_ONCE:
            download = await self._store.claim(list(self._profiles), self._lease)
            if download is None:
                break
            task = asyncio.create_task(self._run(download), name=f"download {download.id}")
            self._running.add(task)
            task.add_done_callback(self._on_end)

    def _on_end(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._loop.wake()

    async def _run(self, download: ModelDownload) -> None:
        extra = {"action": "download", "download_id": str(download.id)}
        progress = _Progress(download.done_bytes, download.total_bytes)
        fetching = asyncio.create_task(self._fetch(download, progress))
        # After an error of the database the lease stays: the download is due again at its end.
        try:
            if await self._is_kept(download, fetching, progress):
                await self._end(download, fetching)
        except asyncio.CancelledError:
            await cancel_all([fetching])
            with contextlib.suppress(Exception):
                async with asyncio.timeout(_RELEASE_SECONDS):
                    await self._store.release(download)
            raise
        except DatabaseUnavailableError as error:
            logger.info("download of %s waits: %s", download.model, error, extra=extra)
        except Exception:
            logger.exception("download of %s: unexpected error", download.model, extra=extra)
            with contextlib.suppress(Exception):
                await self._store.fail(download, _BUG)
        finally:
            await cancel_all([fetching])

    async def _fetch(self, download: ModelDownload, progress: _Progress) -> Downloaded:
        return await download_model(
            self._hosts,
            self._profiles[download.profile],
            download.model,
            download.revision,
            endpoint=self._settings.hub_endpoint,
            token=await asyncio.to_thread(HubToken(self._settings).read),
            report=progress.report,
        )

    async def _is_kept(
        self, download: ModelDownload, fetching: asyncio.Task[Downloaded], progress: _Progress
    ) -> bool:
        """Renew the lease until the files are there; False if it is lost, or the download cancelled."""
        give_up_at = time.monotonic() + self._lease * 2 / 3
        while not (await asyncio.wait([fetching], timeout=self._pause))[0]:
            asked_at = time.monotonic()
            try:
                async with asyncio.timeout(max(0.1, give_up_at - asked_at)):
                    if not await self._store.renew(
                        download, progress.done, progress.total, self._lease
                    ):
                        return False
                give_up_at = asked_at + self._lease * 2 / 3
            except TimeoutError:
                return False
            except Exception as error:
                if not is_transient(error) and not isinstance(error, DatabaseUnavailableError):
                    raise
                if time.monotonic() > give_up_at:
                    return False
        return True

    async def _end(self, download: ModelDownload, fetching: asyncio.Task[Downloaded]) -> None:
        try:
            found = fetching.result()
        except (HostError, ModelUnavailableError) as error:
            await self._store.retry(download, str(error))
        except HubTokenError as error:
            logger.error("download of %s: %s", download.model, error)  # noqa: TRY400 - no bug
            await self._store.fail(download, _UNREADABLE)
        except ModelDownloadError as error:
            await self._store.fail(download, str(error))
        else:
            await self._store.complete(download, found.commit, found.total)
