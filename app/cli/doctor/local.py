"""Checks of the settings and of this machine's disks."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from app.api.startup_checks import check_startup
from app.cli.doctor.findings import Finding, fail, ok, warn
from app.core.addresses import is_loopback
from app.core.settings import Settings

_MIN_FREE_BYTES = 1_000_000_000
_MIN_FREE_SHARE = 0.1  # of a file system that is smaller than that, such as a container's /tmp


def settings_errors(error: ValidationError) -> list[Finding]:
    findings = []
    for one in error.errors():
        name = ".".join(str(part) for part in one["loc"]) or "several"
        findings.append(fail("settings", f"{name}: {one['msg']}", "Correct it: docs/settings.md."))
    return findings


def check_settings(settings: Settings) -> list[Finding]:
    exposure = check_startup(settings)
    findings = [warn("exposure", text, "See docs/authentication.md.") for text in exposure.warnings]
    if exposure.refusal:
        findings.append(fail("exposure", exposure.refusal, "The API does not start like this."))
    findings += _contradictions(settings)
    if not findings:
        findings.append(ok("settings", "; ".join(exposure.notes) or "consistent"))
    return findings


def _contradictions(settings: Settings) -> Iterator[Finding]:
    if settings.default_deadline_seconds > settings.max_deadline_seconds:
        found = "LLM_DEFAULT_DEADLINE_SECONDS exceeds LLM_MAX_DEADLINE_SECONDS"
        to_do = "Requests without a deadline get a later one than clients may request: raise the latter."
        yield warn("settings", found, to_do)
    if settings.team_max_queued is not None and settings.team_max_queued > settings.max_queued:
        found = "LLM_TEAM_MAX_QUEUED exceeds LLM_MAX_QUEUED"
        yield warn("settings", found, "The former has no effect: lower it.")
    if settings.flush_seconds >= settings.lease_seconds:
        found = "LLM_FLUSH_SECONDS is not below LLM_LEASE_SECONDS"
        yield warn("settings", found, "A lost worker's text is lost with it: flush more often.")
    if not is_loopback(settings.metrics_host) and settings.metrics_port is not None:
        place = f"{settings.metrics_host}:{settings.metrics_port}"
        to_do = (
            "They show how much each team uses: restrict access by a network policy, or bind "
            "127.0.0.1 (LLM_METRICS_HOST)."
        )
        yield warn("exposure", f"metrics are served on {place} without a token", to_do)
    if settings.webhook_allow_private:
        to_do = (
            "Clients can have the worker call internal addresses: unset it outside of development."
        )
        yield warn("exposure", "LLM_WEBHOOK_ALLOW_PRIVATE is set", to_do)
    if settings.image_urls == "any":
        to_do = (
            "Clients can have the API read internal addresses: use `public` outside of development."
        )
        yield warn("exposure", "LLM_IMAGE_URLS is any", to_do)
    if not settings.model_repository.is_dir():
        found = f"LLM_MODEL_REPOSITORY={settings.model_repository} is not a directory"
        to_do = (
            "Chat and the check of lengths need its tokenizers and templates: mount the repository "
            "that Triton serves."
        )
        yield warn("settings", found, to_do)


def check_disks(settings: Settings) -> Iterator[Finding]:
    for path in {Path(tempfile.gettempdir()), Path.cwd()}:
        yield disk_space("disk", path)
    if settings.indexes_file is not None and settings.indexes_file.parent.is_dir():
        yield disk_space("disk", settings.indexes_file.parent)


def disk_space(part: str, path: Path) -> Finding:
    disk = shutil.disk_usage(path)
    text = f"{path}: {disk.free / 1e9:.2f} GB are free"
    if disk.free < min(_MIN_FREE_BYTES, disk.total * _MIN_FREE_SHARE):
        return warn(part, text, "Free some space.")
    return ok(part, text)
