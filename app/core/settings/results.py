"""Results: queue limits, attempts, deadlines and retention."""

from typing import Literal

from pydantic import AliasChoices, Field

from app.core.settings.fields import RetentionSeconds, Section


class ResultSettings(Section, title="Results"):
    default_max_tokens: int = Field(512, ge=1)
    """`max_tokens` of a request that names none, or fewer where the model's length leaves fewer.
    `/v1/completions` has OpenAI's default of 16 instead."""
    max_logprobs: int = Field(100_000, ge=1)
    """Most log probabilities of one request: its results x (`max_tokens` x (`logprobs` + 1) +
    prompt tokens x (`prompt_logprobs` + 1)), as each
    token has its own beside the likely ones. One takes about 80 bytes in the database, 100 in a
    worker and 500 in the API. A larger request returns 422."""
    max_images: int = Field(8, ge=0, le=64)
    """Most images of one request; 0 refuses all. Their bytes are bounded by LLM_MAX_BODY_BYTES: as base64
    they are part of the request."""
    max_image_pixels: int = Field(64_000_000, ge=1)
    """Most pixels of the images of one request: a few kilobytes may hold millions, each of which takes at
    least three bytes where it is decoded. An image whose bytes have no size counts as 32 million. A worker
    sends at most twice as many of one team at a time; its further results wait."""
    image_urls: Literal["off", "public", "any"] = "off"
    """Images by http and https URLs. `off`: refused; clients send data URIs. `public`: fetched from public
    addresses when the request is accepted, and kept. `any`: from private addresses, too (development, or a
    store of images in your network). See docs/vision.md#urls."""
    image_url_timeout_seconds: float = Field(10.0, gt=0, le=60)
    """Time limit of all images that one request has fetched."""
    ebnf_grammars: bool = False
    """Whether requests may constrain their texts by a `grammar` in EBNF. An ambiguous one takes more of the
    engine's time with each token, and slows the model for all. JSON schemas, `regex` and `choice` need no
    setting ([sampling.md](sampling.md#structured-outputs))."""
    max_queued: int = Field(1_000_000, ge=1)
    """Most unclaimed results in the queue; a further one returns 429."""
    team_max_queued: int | None = Field(None, ge=1)
    """Most unclaimed results of one team and model; a further one returns 429. `python -m app team`
    overrides it per team. Unset: half of LLM_MAX_QUEUED for all models of a team together, while the
    whole queue is more than half full, if LLM_MAX_QUEUED is at least 1000."""
    team_max_running: int | None = Field(None, ge=1)
    """Most results of one team that run on one model at the same time; the others wait. Unset: no
    limit."""
    team_requests_per_minute: int | None = Field(None, ge=1)
    """Most results a team may send to one model per minute. Unset: no limit."""
    team_tokens_per_minute: int | None = Field(None, ge=1)
    """Most tokens, of prompts and `max_tokens` together, a team may send to one model per minute.
    Unset: no limit."""
    max_attempts: int = Field(5, ge=1, le=100)
    """Lost attempts after which a result fails; attempts that Triton refused do not count."""
    continue_lost_attempts: bool = True
    """Whether the next attempt continues the text of a lost one instead of starting over
    ([continuation.md](continuation.md)). A request may opt out."""
    continue_by_text: bool = False
    """Continue by text on models without the input `resume_token_ids`, such as NVIDIA's backend:
    the worker sends the prompt and the text so far as one prompt. The tokenizer may split it
    differently, so greedy text may differ from that of an undisturbed attempt."""
    default_deadline_seconds: float = Field(86_400.0, gt=0)
    """Deadline of a request that names none, in seconds from its acceptance."""
    max_deadline_seconds: float = Field(604_800.0, gt=0)
    """Longest deadline that a request may set, in seconds."""
    idempotency_seconds: float = Field(86_400.0, ge=1, le=31_536_000)
    """How long an `Idempotency-Key` refers to the result or batch of its first request."""


class HistorySettings(Section, title="History"):
    history_days: int = Field(30, ge=1, le=3650)
    """Days for which figures per minute are kept (`GET /history`, `GET /system`). They outlive
    their results."""
    search: Literal["words", "off"] = "words"
    """Whether workers index the words of ended results for the search (`q`). `off` saves most of the
    time and of the log that indexing takes; a search then returns 422 `search_off`
    ([history.md](history.md#turning-the-search-off)). `python -m app team search` overrides it per team.
    API and workers need the same value."""


class UsageSettings(Section, title="Usage"):
    currency: str = Field("USD", min_length=1, max_length=8, pattern=r"^[^\s\x00-\x1f]+$")
    """Currency of the prices of `python -m app price` ([usage.md](usage.md#prices)). Shown with costs."""


class RetentionSettings(Section, title="Retention"):
    results_retention_seconds: RetentionSeconds = Field(
        None,
        validation_alias=AliasChoices(
            "LLM_RESULTS_RETENTION_SECONDS", "LLM_RETAIN_RESULTS_SECONDS"
        ),
    )
    """Time after its end at which a result is deleted, 60 to 3,153,600,000
    ([retention.md](retention.md)). `python -m app team retain` overrides it per team. Unset:
    results are kept."""
    prompts_retention_seconds: RetentionSeconds = Field(
        None,
        validation_alias=AliasChoices(
            "LLM_PROMPTS_RETENTION_SECONDS", "LLM_RETAIN_PROMPTS_SECONDS"
        ),
    )
    """Time after the end of its last result at which the text of a prompt is erased, 60 to
    3,153,600,000. A prompt that was never sent is kept. Unset: prompts are kept."""
    logs_retention_days: int = Field(
        90,
        validation_alias=AliasChoices("LLM_LOGS_RETENTION_DAYS", "LLM_RETAIN_LOGS_DAYS"),
        ge=1,
        le=3650,
    )
    """Days for which webhook deliveries, ended launches and downloads are kept."""
    usage_retention_days: int = Field(3650, ge=31, le=36_500)
    """Days for which the usage of a day is kept ([usage.md](usage.md)). It outlives its results."""
