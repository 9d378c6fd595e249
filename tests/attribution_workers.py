"""A small index that is built once, and attribution workers as processes of their own."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from app.cli.up.service import ServicePart
from app.core.settings import Settings

INDEX = "corpus"
QUEUE = f"infini-gram/{INDEX}"
SENTENCE = "the quick brown fox jumps over the lazy dog"
DOCUMENTS = [
    {"text": f"Once upon a time {SENTENCE} and away.", "source": "tale", "year": 1901},
    {"text": "Colourless green ideas sleep furiously.\nBob was there.", "source": "grammar"},
    {"text": "A stitch in time saves nine. " * 3, "source": "proverb"},
]


def build_index(directory: Path, documents: Sequence[object] = DOCUMENTS) -> Path:
    """Build the index as a user would; the file that declares it."""
    corpus = directory / "corpus.jsonl"
    corpus.write_text("".join(json.dumps(document) + "\n" for document in documents))
    declarations = directory / "indexes.toml"
    command = [sys.executable, "-m", "app", "index", "build", str(corpus), "--name", INDEX]
    command += ["--out", str(directory / "indexes"), "--file", str(declarations)]
    subprocess.run(command, check=True, env=os.environ | {"LLM_INDEXES_FILE": ""})
    return declarations


def environment_of(settings: Settings) -> dict[str, str]:
    """The settings of a process beside the test's own service."""
    return os.environ | {
        "LLM_DATABASE_URL": settings.database_host,
        "LLM_DATABASE_ADMIN_USER": settings.database_user,
        "LLM_DATABASE_PASSWORD": settings.database_password.get_secret_value(),
        "LLM_DATABASE_DB": settings.database_name,
        "LLM_LEASE_SECONDS": str(settings.lease_seconds),
        "LLM_POLL_SECONDS": str(settings.poll_seconds),
        "LLM_SHUTDOWN_GRACE_SECONDS": "2",
        "LLM_MAX_ATTEMPTS": str(settings.max_attempts),
        "LLM_INDEXES_FILE": str(settings.indexes_file),
    }


@contextlib.asynccontextmanager
async def attribution_worker(
    settings: Settings, log_file: Path, index: str = INDEX
) -> AsyncIterator[ServicePart]:
    """A worker of an index."""
    worker = ServicePart(
        "worker",
        f"worker --kind attribution --index {index}",
        environment_of(settings),
        log_file,
        grace=10,
    )
    await worker.start()
    try:
        yield worker
    finally:
        await worker.stop()
