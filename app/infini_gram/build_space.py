"""Checks of memory and disk space before a build."""

import shutil
from pathlib import Path

from app.core.memory import available_memory
from app.infini_gram.build_options import BuildError, BuildOptions
from app.infini_gram.corpus import Corpus
from app.infini_gram.manifest import WIDTH
from app.infini_gram.suffix_array import pointer_width
from app.infini_gram.tokenizer import Tokenizer

# Bytes of memory for each byte of tokens: the indexer's own figures, by which it divides the work.
_MEMORY_FACTOR = {"u8": 12, "u16": 8}
_BASE_MEMORY = 300_000_000  # Python, numpy, a batch of texts
_BASE_DISK = 20_000_000
_MIN_BYTES_PER_TOKEN = 3  # of text: a lower bound for common tokenizers


def check_estimate(options: BuildOptions, corpus: Corpus, tokenizer: Tokenizer) -> None:
    """Check an estimate first: a refusal now is better than after an hour."""
    text = corpus.likely_text_bytes
    tokens = text if tokenizer.dtype == "u8" else text // _MIN_BYTES_PER_TOKEN
    check_space(options, options.directory.parent, tokenizer, tokens, is_estimate=True)


def check_space(
    options: BuildOptions,
    directory: Path,
    tokenizer: Tokenizer,
    tokens: int,
    *,
    is_estimate: bool = False,
) -> None:
    size = tokens * WIDTH[tokenizer.dtype]
    # At its peak the array exists twice: in parts and merged, or merged and whole.
    disk = 2 * tokens * pointer_width(size) + (size if is_estimate else 0) + _BASE_DISK
    memory = min(options.memory, size * _MEMORY_FACTOR[tokenizer.dtype]) + _BASE_MEMORY
    about = "about " if is_estimate else ""
    free = shutil.disk_usage(directory).free
    if free < disk:
        raise BuildError(
            f"Too little space in {directory}: {about}{_megabytes(disk)} needed for {tokens:,} "
            f"tokens, {_megabytes(free)} free"
        )
    available = available_memory()
    if available < memory:
        raise BuildError(
            f"Too little memory: {about}{_megabytes(memory)} needed, {_megabytes(available)} "
            "available: close something, or give the indexer less (--memory)"
        )


def _megabytes(size: int) -> str:
    return f"{max(1, round(size / 1e6)):,} MB"
