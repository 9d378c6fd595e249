"""The last step of a batch: its outcomes become an output file and an error file."""

from uuid import UUID

from app.batches.dialect import BatchServices
from app.batches.lease import BatchLease
from app.batches.rows import Batch

_PAGE = 100  # outcomes that are written at once


class Finalizer:
    """Writes the files of one batch and ends it."""

    def __init__(self, services: BatchServices, feeder_id: UUID, lease: BatchLease) -> None:
        self._services = services
        self._feeder_id = feeder_id
        self._lease = lease

    async def finalize(self, batch: Batch) -> None:
        """Write the files and end the batch, unless another process holds it by then."""
        work = self._services.work
        output, errors = (self._services.files.writer(batch.team_id) for _ in range(2))
        try:
            after = 0
            while outcomes := await work.outcomes(batch.id, after, _PAGE):
                for one in outcomes:
                    writer = output if one.is_completed else errors
                    await writer.write(one.outcome.encode() + b"\n")
                after = outcomes[-1].line
                if not await self._lease.renew():
                    return
            for writer in (output, errors):
                if writer.size:
                    await writer.store_rest()
            await work.end(
                self._feeder_id,
                batch,
                batch.expected_end,
                output if output.size else None,
                errors if errors.size else None,
            )
        finally:
            await output.discard()
            await errors.discard()
