"""Access to a Triton server, which has no authentication: a secret in a header of every request.

With the restrictions, a request without the header gets an answer about the server's health only.
Otherwise each client of its port can have it load code (RepositoryModelLoad with files), write
files (trace and log settings) and map memory.
https://github.com/triton-inference-server/server/blob/main/docs/customization_guide/inference_protocols.md
"""

import secrets

KEY = "llm-secret"  # also the name of HTTP's header
_GRPC_HEADER = f"triton-grpc-protocol-{KEY}"
# All of Triton's protocols but `health`; triton/health and kubernetes/triton.yaml have the same.
RESTRICTED = (
    "inference,metadata,model-config,model-repository,shared-memory,statistics,trace,logging"
)

Headers = tuple[tuple[str, str], ...]


def new_secret() -> str:
    return secrets.token_urlsafe(32)


def restriction(secret: str) -> str:
    """Option of tritonserver that closes its gRPC port to requests without the secret."""
    return f"--grpc-restricted-protocol={RESTRICTED}:{KEY}={secret}"


def grpc_headers(secret: str | None) -> Headers:
    """Metadata of every call; a server without restrictions ignores it."""
    return () if secret is None else ((_GRPC_HEADER, secret),)
