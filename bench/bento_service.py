"""A task of BentoML that answers at once: what P3 holds its server against. Runs in `.venv-peers`."""

import bentoml


@bentoml.service
class Instant:
    """One task, and nothing to wait for."""

    @bentoml.task  # type: ignore[untyped-decorator]
    async def complete(self, prompt: str) -> str:
        """Say something as short as the scripted model does."""
        return f"said: {prompt}"
