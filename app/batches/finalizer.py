"""The last step of a batch: its outcomes become an output file and an error file."""

from uuid import UUID

from app.batches.dialect import BatchServices
from app.batches.lease import BatchLease
from app.batches.rows import Batch

_PAGE = 100  # outcomes that are written at once


async def finalize(
    services: BatchServices, feeder_id: UUID, batch: Batch, lease: BatchLease
) -> None:
    """Write the files and end the batch, unless another process holds it by then."""
    output, errors = (services.files.writer(batch.team_id) for _ in range(2))
    try:
        after = 0
        while outcomes := await services.work.outcomes(batch.id, after, _PAGE):
            for one in outcomes:
                writer = output if one.is_completed else errors
                await writer.write(one.outcome.encode() + b"\n")
            after = outcomes[-1].line
            if not await lease.renew():
                return
        written = [writer if writer.size else None for writer in (output, errors)]
        for file in filter(None, written):
            await file.store_rest()
        await services.work.end(feeder_id, batch, batch.expected_end, *written)
    finally:
        await output.discard()
        await errors.discard()
