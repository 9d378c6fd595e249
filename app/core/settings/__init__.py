"""Settings of the service, read from the environment once, at start.

Each section is a class of its own; `docs/settings.md` is generated from their fields. Nothing reads
the environment at import: `cli` builds the settings and hands them down.
"""

from app.core.settings import api, connections, indexes, observability, processes, results


class Settings(
    connections.DatabaseSettings,
    connections.TritonSettings,
    api.HttpSettings,
    api.AuthenticationSettings,
    results.ResultSettings,
    results.HistorySettings,
    results.UsageSettings,
    results.RetentionSettings,
    processes.WorkerSettings,
    processes.BatchSettings,
    processes.JobSettings,
    observability.ObservabilitySettings,
    processes.WebhookSettings,
    processes.LaunchSettings,
    processes.DownloadSettings,
    indexes.IndexSettings,
):
    """All settings of an API or worker process; names and units as in `docs/settings.md`."""

    @property
    def hosts_to_check(self) -> list[str] | None:
        """Names accepted in Host and Origin; None if any Host is accepted."""
        is_chosen = "allowed_hosts" in self.model_fields_set
        return self.allowed_hosts if is_chosen or not self.is_authenticated else None
