"""The secret that keeps strangers away from a server: Triton has no authentication.

A client of an unrestricted port can have the server load code, write files and map memory. With
the restrictions, a request without the secret gets an answer about the server's health only.
"""

from __future__ import annotations

KEY = "llm-secret"  # name of HTTP's header; gRPC's is triton-grpc-protocol-llm-secret
# All of Triton's protocols but `health`.
RESTRICTED = (
    "inference,metadata,model-config,model-repository,shared-memory,statistics,trace,logging"
)


def restrict(command: list[str], secret: str) -> list[str]:
    """The server's command with the restrictions; as it is if there is no secret."""
    options = ("--grpc-restricted-protocol", "--http-restricted-api")
    added = [f"{option}={RESTRICTED}:{KEY}={secret}" for option in options] if secret else []
    return [*command, *added]
