"""The client's calls against the service, blocking and awaited."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pydantic import SecretStr

from app.core.settings import Settings
from app.webhooks.sender import sign
from llm_api_client import (
    APIStatusError,
    AsyncClient,
    AuthenticationError,
    Client,
    ConfigurationError,
    ConflictError,
    InvalidRequestError,
    LimitReachedError,
    NotFoundError,
    Result,
    ResultFailedError,
    WaitTimeoutError,
    verify_webhook,
)
from tests.conftest import Service
from tests.integration.client.support import blocking, url_of
from tests.integration.support import UNKNOWN_ID, serve
from tests.unit.api.test_startup_checks import STRONG
from tests.unit.auth.test_jwt import sign as sign_token

ENDLESS = "{{chunks=90000 delay_ms=20}}"
MANY_TOKENS = {"max_tokens": 90_000}


@pytest.fixture
async def one(settings: Settings) -> AsyncIterator[Service]:
    """API and worker in one process, behind a socket."""
    async with serve(settings, with_worker=True) as service:
        yield service


async def test_the_life_of_a_result(one: Service) -> None:
    def work(client: Client) -> None:
        sent = client.send("{{chunks=5}} go", model="scripted", metadata={"row": 1})
        assert sent.metadata == {"row": 1}
        done = client.wait(sent, timeout=30).checked()
        assert done.text
        assert done.usage is not None
        assert done.created_at is not None
        assert client.get(sent.id) == done
        with client.stream(done) as stream:
            assert "".join(stream) == stream.text == done.text
        again = client.retry(done, wait=30)
        assert (again.retry_of, again.state) == (done.id, "completed")
        assert [one.attempt for one in client.attempts(again)] == [1]
        client.delete(again)
        with pytest.raises(NotFoundError, match="not_found"):
            client.get(again)

    await blocking(one, work)


async def test_the_same_calls_awaited(one: Service) -> None:
    async with AsyncClient(url_of(one)) as client:
        sent = await client.send([{"role": "user", "content": "{{chunks=5}}"}], model="scripted")
        async with client.stream(sent) as stream:
            deltas = [delta async for delta in stream]
        assert stream.result is not None
        assert "".join(deltas) == stream.text == stream.result.text
        assert (await client.wait(sent)).id == sent.id
        assert [one.id async for one in client.list()] == [sent.id]


async def test_a_cancelled_result_keeps_its_text(one: Service) -> None:
    def work(client: Client) -> None:
        sent = client.send(ENDLESS, model="scripted", parameters=MANY_TOKENS)
        with pytest.raises(WaitTimeoutError):
            client.wait(sent, timeout=0.2)
        with pytest.raises(ConflictError):
            client.retry(sent)
        with client.stream(sent) as stream:
            assert next(iter(stream))
        client.cancel(sent)
        ended = client.wait(sent)
        with pytest.raises(ResultFailedError, match="cancelled") as failed:
            ended.checked()
        assert failed.value.result.text
        other = client.send(ENDLESS, model="scripted", parameters=MANY_TOKENS)
        assert client.cancel_all(model="scripted") == 1
        assert client.wait(other).state == "failed"

    await blocking(one, work)


async def test_a_list_of_requests(one: Service) -> None:
    def work(client: Client) -> list[Result | APIStatusError]:
        requests = [{"content": "{{chunks=2}}", "idempotency_key": f"k{i}"} for i in range(50)]
        first = client.send_many(requests, model="scripted")
        assert [one.id for one in first if isinstance(one, Result)] == [
            one.id
            for one in client.send_many(requests, model="scripted")
            if isinstance(one, Result)
        ]
        return client.send_many(["x", {"content": "", "model": "scripted"}, "y"], model="scripted")

    good, wrong, last = await blocking(one, work)
    assert isinstance(good, Result)
    assert isinstance(last, Result)
    assert isinstance(wrong, InvalidRequestError)
    assert wrong.fields[0].field == "content"


async def test_equal_requests_are_reused(one: Service) -> None:
    greedy = {"temperature": 0, "max_tokens": 5}

    def work(client: Client) -> str:
        def send(**options: Any) -> Result:
            return client.send("{{chunks=2}}", model="scripted", parameters=greedy, **options)

        source = client.wait(send(reuse=True))
        again = send(reuse=True)
        assert (again.state, again.reused, again.reused_from) == ("completed", True, source.id)
        assert (again.text, again.usage) == (source.text, source.usage)
        plain = client.wait(send())
        assert (plain.reused, plain.reused_from) == (False, None)
        listed = client.send_many(["{{chunks=2}}"], model="scripted", parameters=greedy, reuse=True)
        assert [one.reused_from for one in listed if isinstance(one, Result)] == [source.id]
        return source.id

    source_id = await blocking(one, work)
    async with AsyncClient(url_of(one)) as client:
        awaited = await client.send("{{chunks=2}}", model="scripted", parameters=greedy, reuse=True)
        assert awaited.reused_from == source_id


async def test_history(one: Service) -> None:
    def work(client: Client) -> None:
        context = client.contexts.create("{{chunks=2}} unmistakable", metadata={"a": [1]})
        assert client.contexts.get(context.id) == context
        sent = [client.send(model="scripted", context_id=context.id) for _ in range(5)]
        ended = [client.wait(one) for one in sent]
        newest = [one.id for one in reversed(ended)]
        assert [one.id for one in client.list(context_id=context.id)] == newest
        assert [one.id for one in client.list(limit=2)] == newest[:2]
        assert list(client.list(state="failed")) == []
        two = [newest[3], newest[1]]
        assert [one.id for one in client.list(ids=two)] == two[::-1]
        assert [one.id for one in client.export(ids=two)] == two[::-1]
        tagged = client.wait(client.send("{{chunks=1}}", model="scripted", metadata={"a b": True}))
        for pair, found in (({"a b": True}, [tagged.id]), ({"a b": False}, [])):
            assert [one.id for one in client.list(metadata=pair)] == found
            assert [one.id for one in client.export(metadata=pair)] == found
        assert list(client.search("unmistakable", metadata={"a b": True})) == []
        assert tagged.context_id is not None
        client.contexts.delete(tagged.context_id)
        numbers = {"rate": 3e-05, "large": 1e16, "two": 2.0, "count": 7}
        numbered = client.wait(client.send("{{chunks=1}}", model="scripted", metadata=numbers))
        for key, value in numbered.metadata.items():
            assert [one.id for one in client.list(metadata={key: value})] == [numbered.id]
        with pytest.raises(ConfigurationError, match="a text, a number"):
            list(client.list(metadata={"count": None}))  # type: ignore[dict-item]
        assert numbered.context_id is not None
        client.contexts.delete(numbered.context_id)
        exported = list(client.export(model="scripted"))
        assert [one.id for one in exported] == newest
        assert {one.content for one in exported} == {"{{chunks=2}} unmistakable"}
        assert [one.text for one in client.export(limit=3)] == [one.text for one in exported[:3]]
        tomorrow = datetime.now(UTC) + timedelta(days=1)
        assert list(client.list(created_after=tomorrow)) == []
        while len(list(client.search("unmistakable", state="completed"))) < 5:
            pass
        client.contexts.delete(context.id)
        assert list(client.contexts.list()) == []

    await blocking(one, work)


async def test_models_servers_and_launches(one: Service) -> None:
    def work(client: Client) -> None:
        assert [model.name for model in client.models.list() if model.ready] == ["scripted"]
        assert client.models.get("scripted").ready
        assert [server.name for server in client.servers.list()] == ["default"]
        added = client.servers.add("other", "127.0.0.1:1")
        assert client.servers.get("other").grpc == added.grpc
        assert client.servers.drain("other").state == "draining"
        assert client.servers.resume("other").state == "active"
        client.servers.remove("other")
        assert list(client.launches.list()) == []
        assert client.launches.profiles() == []
        assert client.attributions.indexes() == []
        with pytest.raises(NotFoundError, match="unknown_index"):
            client.attributions.of_text("text", index="none")

    await blocking(one, work)


async def test_webhooks(one: Service) -> None:
    def work(client: Client) -> None:
        first, second = client.webhooks.secret(), client.webhooks.rotate_secret()
        body = b'{"type": "result.completed", "data": {"id": "r", "state": "completed", "model_name": "m"}}'
        headers = sign([second, first], "msg_r", body)  # as the service signs
        for secret in (first, second):
            assert verify_webhook(body, headers, secret).data.id == "r"
        assert list(client.webhooks.deliveries()) == []
        with pytest.raises(NotFoundError):
            client.webhooks.redeliver(UNKNOWN_ID)

    await blocking(one, work)


async def test_refusals_are_classes(one: Service) -> None:
    def work(client: Client) -> None:
        with pytest.raises(NotFoundError, match="unknown_model"):
            client.send("x", model="none")
        with pytest.raises(InvalidRequestError) as wrong:
            client.send("x", model="scripted", parameters={"temperature": -1})
        assert wrong.value.fields[0].field.startswith("parameters.temperature")
        client.send("x", model="scripted", idempotency_key="k")
        with pytest.raises(ConflictError, match="idempotency_conflict") as conflict:
            client.send("y", model="scripted", idempotency_key="k")
        assert conflict.value.result_id

    await blocking(one, work)


@pytest.mark.trial
async def test_keys(settings: Settings) -> None:
    guarded = settings.model_copy(update={"jwt_secret": SecretStr(STRONG)})
    async with serve(guarded) as service:
        token = sign_token({"team_id": "red", "token_id": "t"})
        me = await blocking(service, lambda client: client.me(), token)
        assert (me.team_id, me.scopes) == ("red", ["use"])
        for key in (None, "wrong"):
            with pytest.raises(AuthenticationError) as refused:
                await blocking(service, lambda client: client.me(), key)
            assert refused.value.advice


async def test_a_limit_is_waited_for(settings: Settings) -> None:
    """A rate is reached: the client repeats the request after `Retry-After`."""
    limited = settings.model_copy(update={"team_requests_per_minute": 60})
    async with serve(limited) as service:

        def work(client: Client) -> None:
            many = [{"content": "x", "idempotency_key": f"k{i}"} for i in range(60)]
            client.send_many(many, model="scripted")
            assert client.send("x", model="scripted").state == "pending"
            client.driver.patience = 0
            with pytest.raises(LimitReachedError) as refused:
                client.send_many(["x"] * 30, model="scripted")
            assert refused.value.retry_after

        await blocking(service, work)
