"""Commands on results: send, get, follow, retry, cancel, list, search, compare."""

from llm_api_client.cli.arguments import (
    Arguments,
    Subparsers,
    add_parameters,
    add_prompt,
    add_reuse,
    model_of,
    pairs_of,
    parameters_of,
    prompt_of,
)
from llm_api_client.cli.output import Output
from llm_api_client.client import Client
from llm_api_client.schemas import Result


def add_commands(commands: Subparsers) -> None:
    """Add the commands to the parser."""
    send = commands.add_parser("send", help="send a prompt; prints the result's id")
    add_prompt(send)
    send.add_argument("-m", "--model", help="default: the only model that is ready")
    add_parameters(send)
    add_reuse(send)
    send.add_argument("--key", metavar="KEY", help="Idempotency-Key: repeat the command safely")
    send.add_argument(
        "-f", "--follow", action="store_true", help="print the text as it is generated"
    )
    send.set_defaults(run=_send)
    get = commands.add_parser("get", help="print a result")
    get.add_argument("id")
    get.add_argument("-w", "--wait", type=float, metavar="SECONDS", help="wait for its end")
    get.set_defaults(run=_get)
    follow = commands.add_parser("follow", help="print a result's text as it is generated")
    follow.add_argument("id")
    follow.set_defaults(run=_follow)
    retry = commands.add_parser("retry", help="send an ended result again; prints the new id")
    retry.add_argument("id")
    retry.add_argument("-f", "--follow", action="store_true", help="print the text")
    retry.set_defaults(run=_retry)
    cancel = commands.add_parser("cancel", help="cancel results; their text so far is kept")
    cancel.add_argument("id", nargs="+")
    cancel.set_defaults(run=_cancel)
    _add_lists(commands)
    compare = commands.add_parser("compare", help="send a prompt to several models")
    add_prompt(compare)
    compare.add_argument(
        "-m", "--model", action="append", help="a model (repeat); default: all ready"
    )
    add_parameters(compare)
    add_reuse(compare)
    compare.set_defaults(run=_compare)


def _add_lists(commands: Subparsers) -> None:
    listing = commands.add_parser("list", help="list results, newest first")
    search = commands.add_parser("search", help="find results by words of prompt, text or error")
    search.add_argument("q", metavar="WORDS", help='all of them; "a phrase", or, -not')
    for parser in (listing, search):
        parser.add_argument("--state", choices=("pending", "completed", "failed"))
        parser.add_argument("-m", "--model")
        parser.add_argument("-n", "--limit", type=int, default=20, help="most results (20)")
        parser.add_argument(
            "--metadata", metavar="KEY=VALUE", action="append", default=[],
            help="a pair of their metadata (repeat: all of them)",
        )  # fmt: skip
    listing.set_defaults(run=_list)
    search.set_defaults(run=_search)


def _send(client: Client, arguments: Arguments, output: Output) -> int:
    result = client.send(
        prompt_of(arguments),
        model=model_of(client, arguments.model),
        parameters=parameters_of(arguments),
        reuse=arguments.reuse,
        idempotency_key=arguments.key,
    )
    return _accepted(client, result, output, follow=arguments.follow)


def _accepted(client: Client, result: Result, output: Output, *, follow: bool) -> int:
    if follow:
        return _print_stream(client, result.id, output)
    if output.is_json:
        output.json(result)
    else:
        output.line(result.id)
    return 0


def _get(client: Client, arguments: Arguments, output: Output) -> int:
    if arguments.wait is None:
        result = client.get(arguments.id, partial=True)
    else:
        result = client.wait(arguments.id, timeout=arguments.wait)
    output.result(result)
    if not result.has_ended:
        place = "" if result.queue_position is None else f", place {result.queue_position}"
        output.note(f"pending{place}")
    return _status(result, output)


def _follow(client: Client, arguments: Arguments, output: Output) -> int:
    return _print_stream(client, arguments.id, output)


def _print_stream(client: Client, result_id: str, output: Output) -> int:
    with client.stream(result_id) as stream:
        restarts = 0
        for event in stream.events():
            if output.is_json:
                continue
            if stream.restarts > restarts:
                restarts = stream.restarts
                output.note(f"\n--- attempt {event.attempt}, from character {event.offset} ---")
            output.text(event.text)
    result = stream.result
    assert result is not None
    if output.is_json:
        output.json(result)
    else:
        output.line("")
    return _status(result, output)


def _status(result: Result, output: Output) -> int:
    """The exit status of a command about one result."""
    if result.error is not None:
        output.note(str(result.error))
    return 1 if result.state == "failed" else 0


def _retry(client: Client, arguments: Arguments, output: Output) -> int:
    return _accepted(client, client.retry(arguments.id), output, follow=arguments.follow)


def _cancel(client: Client, arguments: Arguments, output: Output) -> int:
    output.results([client.cancel(one) for one in arguments.id])
    return 0


def _list(client: Client, arguments: Arguments, output: Output) -> int:
    found = client.list(
        limit=arguments.limit, state=arguments.state, model=arguments.model,
        metadata=pairs_of(arguments),
    )  # fmt: skip
    output.results(found)
    return 0


def _search(client: Client, arguments: Arguments, output: Output) -> int:
    found = client.search(
        arguments.q, limit=arguments.limit, state=arguments.state, model=arguments.model,
        metadata=pairs_of(arguments),
    )  # fmt: skip
    output.results(found)
    return 0


def _compare(client: Client, arguments: Arguments, output: Output) -> int:
    compared = client.compare(
        prompt_of(arguments), models=arguments.model, parameters=parameters_of(arguments),
        reuse=arguments.reuse,
    )  # fmt: skip
    status = 0
    for result in compared:
        if output.is_json:
            output.json(result)
        else:
            output.line(output.coloured(f"=== {result.model_name} ({_cost(result)})", "dim"))
            output.result(result)
        status = max(status, _status(result, output))
    return status


def _cost(result: Result) -> str:
    """Tokens and seconds of a result."""
    tokens = result.usage.completion_tokens if result.usage else None
    parts = [] if tokens is None else [f"{tokens} tokens"]
    if result.seconds is not None:
        parts.append(f"{result.seconds:.2f} s")
    return ", ".join(parts) or result.state
