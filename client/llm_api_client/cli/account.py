"""Commands on the service: login, models, attribute, completion, mcp."""

import getpass
import sys

from llm_api_client import config, mcp_server
from llm_api_client.cli.arguments import Arguments, Subparsers
from llm_api_client.cli.completion import SHELLS, script
from llm_api_client.cli.output import Output
from llm_api_client.client import Client
from llm_api_client.errors import ConfigurationError, ResultFailedError
from llm_api_client.schemas import Result


def add_commands(commands: Subparsers) -> None:
    """Add the commands to the parser."""
    login = commands.add_parser(
        "login", help="store the URL and the API key (read from standard input)"
    )
    login.set_defaults(run_alone=_login)
    models = commands.add_parser("models", help="list the models")
    models.set_defaults(run=_models)
    attribute = commands.add_parser(
        "attribute", help="find the parts of a text that a corpus contains"
    )
    attribute.add_argument(
        "id", nargs="?", help="a completed result; none: a text from standard input"
    )
    attribute.add_argument("-i", "--index", help="the corpus; default: the only one")
    attribute.set_defaults(run=_attribute)
    mcp = commands.add_parser(
        "mcp", help="serve tools for agents (MCP) on standard input and output"
    )
    mcp.set_defaults(run_alone=_mcp)
    completion = commands.add_parser("completion", help="print a script that completes commands")
    completion.add_argument("shell", choices=SHELLS)
    completion.set_defaults(run_alone=_completion)


def _login(arguments: Arguments, output: Output) -> int:
    url = config.checked_url(arguments.url or config.resolve(allow_http=True).url)
    if sys.stdin.isatty():
        key = getpass.getpass(f"API key for {url} (none if it needs none): ")
    else:
        key = sys.stdin.readline()
    key = config.checked_key(key)
    with Client(url, key or None, allow_http=arguments.allow_http) as client:
        caller = client.me()
        is_allowed = client.endpoint.allow_http
    file = config.write_login(config.Endpoint(url, key or None, is_allowed))
    output.note(f"Team {caller.team_id} at {url}, stored in {file}.")
    return 0


def _mcp(arguments: Arguments, _output: Output) -> int:
    mcp_server.serve(arguments.url, arguments.patience, allow_http=arguments.allow_http)
    return 0


def _completion(arguments: Arguments, output: Output) -> int:
    output.line(script(arguments.shell, arguments.names))
    return 0


def _models(client: Client, _arguments: Arguments, output: Output) -> int:
    models = client.models.list()
    if output.is_json:
        output.json(models)
        return 0
    rows = (
        (
            one.name, "ready" if one.ready else "-", "chat" if one.chat else "", one.max_model_len,
            one.queued, one.running, f"{one.tokens_per_second:.0f}", one.reason,
        )
        for one in models
    )  # fmt: skip
    head = ("MODEL", "READY", "CHAT", "MAX TOKENS", "QUEUED", "RUNNING", "TOKENS/S", "REASON")
    output.table(head, rows)
    return 0


def _attribute(client: Client, arguments: Arguments, output: Output) -> int:
    index = arguments.index
    if index is None:
        names = client.attributions.indexes()
        if len(names) != 1:
            raise ConfigurationError(
                f"Name a corpus with --index: {', '.join(names) or 'none exists'}."
            )
        index = names[0]
    if arguments.id is None:
        found = client.attributions.of_text(sys.stdin.read(), index=index).to_dict()
    else:
        ended = client.wait(client.attributions.of_result(arguments.id, index=index))
        found = _whole(ended)
    if output.is_json:
        output.json(found)
        return 0
    spans = found["spans"]
    output.table(
        ("TOKENS", "COUNT", "TEXT"), ((one["length"], one["count"], one["text"]) for one in spans)
    )
    return 0


def _whole(result: Result) -> dict[str, object]:
    """The attribution of an ended result."""
    if not isinstance(result.checked().result, dict):
        raise ResultFailedError(result)
    attribution: dict[str, object] = result.result  # type: ignore[assignment]
    return attribution
