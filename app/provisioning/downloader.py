"""Runs downloads of models from their row to their end: a part of a worker process.

The host keeps what it has received. So a download whose worker dies is claimed by another one after its
lease, and continues. The host refuses a download while another one of the model runs, such as that of a
worker that is frozen: it is tried again.
"""

import asyncio
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
    ModelBusyError,
    ModelDownloadError,
    download_model,
)
from app.provisioning.profiles import Profile

logger = logging.getLogger(__name__)

_MAX_AT_ONCE = 2  # downloads that one process runs at the same time
_RENEW_SECONDS = 2.0
_MAX_ATTEMPTS = 10  # of a download whose host cannot be reached, or is busy with the model
_RETRY_SECONDS = 15.0
_BUG = "a bug in the service; its worker's log has the details"


@dataclass(slots=True)
class _Progress:
    done: int = 0
    total: int | None = None

    def report(self, done: int, total: int) -> None:
        self.done, self.total = done, total or self.total


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
        self._loop = PollingLoop("downloads", self._start_due, seconds=settings.launch_poll_seconds)
        listener.subscribe(LAUNCHES, lambda _: self._loop.wake())

    async def run(self) -> None:
        """Run until cancelled; another worker continues those that run, after their leases."""
        async with self._hosts:
            try:
                await self._loop.run()
            finally:
                await cancel_all(self._running)

    async def _start_due(self) -> None:
        free = _MAX_AT_ONCE - len(self._running)
        for download in await self._store.claim(list(self._profiles), free, self._lease):
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
        except DatabaseUnavailableError as error:
            logger.info("download of %s waits: %s", download.model, error, extra=extra)
        except Exception:
            logger.exception("download of %s: unexpected error", download.model, extra=extra)
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
        renewed_at = time.monotonic()
        while not (await asyncio.wait([fetching], timeout=self._pause))[0]:
            try:
                asked_at = time.monotonic()
                if not await self._store.renew(
                    download, progress.done, progress.total, self._lease
                ):
                    return False
                renewed_at = asked_at
            except Exception as error:
                if not is_transient(error) and not isinstance(error, DatabaseUnavailableError):
                    raise
                if time.monotonic() - renewed_at > self._lease * 2 / 3:
                    return False
        return True

    async def _end(self, download: ModelDownload, fetching: asyncio.Task[Downloaded]) -> None:
        try:
            found = fetching.result()
        except (HostError, ModelBusyError) as error:
            if download.attempt < _MAX_ATTEMPTS:
                await self._store.retry(download, str(error), _RETRY_SECONDS)
            else:
                await self._store.fail(download, f"{error}, also after {_MAX_ATTEMPTS} attempts")
        except (HubTokenError, ModelDownloadError) as error:
            await self._store.fail(download, str(error))
        except Exception:
            logger.exception("download of %s: unexpected error", download.model)
            await self._store.fail(download, _BUG)
        else:
            await self._store.complete(download, found.commit, found.total)
