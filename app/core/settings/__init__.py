"""Settings of the service, read from the environment once, at start.

Each section is a class of its own; `docs/settings.md` is generated from their fields. Nothing reads
the environment at import: `cli` builds the settings and hands them down.
"""

from app.core.settings.api import AuthenticationSettings, HttpSettings
from app.core.settings.connections import DatabaseSettings, TritonSettings
from app.core.settings.indexes import IndexSettings
from app.core.settings.observability import ObservabilitySettings
from app.core.settings.processes import (
    BatchSettings,
    LaunchSettings,
    WebhookSettings,
    WorkerSettings,
)
from app.core.settings.results import HistorySettings, ResultSettings, RetentionSettings


class Settings(
    DatabaseSettings,
    TritonSettings,
    HttpSettings,
    AuthenticationSettings,
    ResultSettings,
    HistorySettings,
    RetentionSettings,
    WorkerSettings,
    BatchSettings,
    ObservabilitySettings,
    WebhookSettings,
    LaunchSettings,
    IndexSettings,
):
    """All settings of an API or worker process; names and units as in `docs/settings.md`."""

    @property
    def hosts_to_check(self) -> list[str] | None:
        """Names accepted in Host and Origin; None if any Host is accepted."""
        is_chosen = "allowed_hosts" in self.model_fields_set
        return self.allowed_hosts if is_chosen or not self.is_authenticated else None
