"""Targets of webhooks: what is refused at the door, and what is judged by its addresses."""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_address
from typing import Any

import httpx
import pytest
from hypothesis import given, strategies as st

from app.core.url_guard import RefusedTargetError, is_public, resolve, url_fault, webhook_rules

PERMIT = "LLM_WEBHOOK_ALLOW_PRIVATE"

NEVER = [
    ("", "http"), ("nonsense", "http"), ("ftp://example.com/", "http"), ("//example.com/", "http"),
    ("javascript:alert(1)", "http"), ("file:///etc/passwd", "http"), ("http:example.com", "host"),
    ("gopher://127.0.0.1:6379/_SET", "http"), ("http://", "host"), ("http:///path", "host"),
    ("http://user@example.com/", "user"), ("http://user:pw@example.com/", "user"),
    ("http://:pw@example.com/", "user"), ("https://example.com\\@evil.com/", "user"),
    ("http://127.0.0.1:80@8.8.8.8/", "user"), ("http://a b.com/", "host"),
    ("http://127%2e0.0.1/", "host"), ("http://%6c%6f/", "host"), ("http://a..b/", "host"),
    ("http://" + "a" * 64 + ".com/", "host"), ("http://" + "a." * 130 + "com/", "host"),
    ("http://example.com:0/", "port"), ("http://example.com:65536/", "port"),
    ("http://example.com:x/", "URL"), ("http://exam\nple.com/", "URL"), ("http://[::1/", "URL"),
    ("http://[v1.x]/", "URL"), ("http://\uff11\uff12\uff17.0.0.1/", "URL"), ("http://0177.0.0.1/", "URL"),
    ("http://[fe80::1%25eth0]/", "host"), ("http://999.1.1.1/", "URL"),
]  # fmt: skip

PRIVATE = [
    "http://localhost/", "https://LOCALHOST:8080/x", "http://localhost./", "http://a.localhost/",
    "http://127.0.0.1/", "http://127.0.0.1./", "http://127.1/", "http://2130706433/",
    "http://0x7f000001/", "http://0x7f.1/", "http://017700000001/", "http://0/", "http://0.0.0.0/",
    "http://127\u30020\u30020\u30021/", "http://10.0.0.1/", "http://172.16.5.4/", "http://192.168.1.1/",
    "http://169.254.169.254/latest/meta-data", "http://100.64.0.1/", "http://224.0.0.1/",
    "http://255.255.255.255/", "http://240.0.0.1/", "http://192.0.2.1/", "http://198.18.0.1/",
    "http://[::1]/", "http://[::]/", "http://[::ffff:127.0.0.1]/", "http://[::ffff:7f00:1]/",
    "http://[::127.0.0.1]/", "http://[fe80::1]/", "http://[fc00::1]/", "http://[fd12::1]/",
    "http://[fec0::1]/", "http://[ff02::1]/", "http://[2002:7f00:1::]/", "http://[2002:a00:1::1]/",
    "http://[64:ff9b::7f00:1]/", "http://[64:ff9b::a00:1]/", "http://[64:ff9b:1::1]/",
    "http://[2001:db8::1]/", "http://[2001::1]/", "http://[100::1]/",
]  # fmt: skip

GOOD = [
    "http://example.com/", "https://example.com:8443/a?b=c#d", "https://EXAMPLE.com./hook",
    "http://8.8.8.8/", "http://134744072/", "https://[2606:4700:4700::1111]/", "http://a_b.example/",
    "https://bücher.example/", "http://[64:ff9b::808:808]/", "http://[::ffff:8.8.8.8]/",
    "http://localhost.example.com/", "http://notlocalhost/",
]  # fmt: skip


@pytest.mark.parametrize(("url", "words"), NEVER)
@pytest.mark.parametrize("allow_private", [False, True])
def test_what_is_no_webhook_is_refused(url: str, words: str, allow_private: bool) -> None:
    fault = url_fault(url, webhook_rules(allow_private=allow_private))
    assert fault is not None
    assert words in fault


@pytest.mark.parametrize("url", PRIVATE)
def test_private_targets_need_the_setting(url: str) -> None:
    fault = url_fault(url, webhook_rules(allow_private=False))
    assert fault is not None
    assert PERMIT in fault
    assert url_fault(url, webhook_rules(allow_private=True)) is None


@pytest.mark.parametrize("url", GOOD)
def test_public_targets_pass(url: str) -> None:
    assert url_fault(url, webhook_rules(allow_private=False)) is None


def test_long_hosts_are_judged_quickly() -> None:
    for host in ("1" * 2000, "1." * 1000, "a." * 1000, "a-" * 1000):
        assert url_fault(f"http://{host}/", webhook_rules(allow_private=False)) is not None


@given(
    scheme=st.sampled_from(["", "http:", "http://", "https://", "http://["]),
    rest=st.text(st.characters()) | st.text("0123456789abcdefx.:[]%@/\\"),
)
def test_any_text_is_judged_without_an_error(scheme: str, rest: str) -> None:
    fault = url_fault(scheme + rest, webhook_rules(allow_private=False))
    assert fault is None or fault
    if fault is None:
        assert httpx.URL(scheme + rest).scheme in ("http", "https")


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True), ("127.0.0.1", False), ("224.0.0.1", False), ("::1", False),
        ("2606:4700:4700::1111", True), ("::ffff:10.0.0.1", False), ("4000::1", False),
        ("2002:808:808::1", True), ("2002:c0a8:1::1", False), ("fe80::1%2", False),
        ("168.63.129.16", False), ("::ffff:168.63.129.16", False), ("192.0.0.9", False),
        ("192.88.99.1", False), ("3fff::1", False),
    ],
)  # fmt: skip
def test_is_public(address: str, public: bool) -> None:
    assert is_public(ip_address(address)) is public


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


class Names:
    """A nameserver of the test's own."""

    def __init__(self, *addresses: str) -> None:
        self._addresses = addresses
        self.asked: list[tuple[str, int]] = []

    def __call__(self, host: str, port: int, **_: Any) -> list[tuple[Any, ...]]:
        self.asked.append((host, port))
        if not self._addresses:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(0, 0, 0, "", (address, port)) for address in self._addresses]


async def test_every_address_of_a_name_is_judged(executor: ThreadPoolExecutor) -> None:
    url = httpx.URL("https://Example.com./x")
    public = Names("8.8.8.8", "2606:4700:4700::1111", "8.8.8.8")
    assert await resolve(url, public, executor, webhook_rules(allow_private=False)) == [
        "8.8.8.8", "2606:4700:4700::1111",
    ]  # fmt: skip
    assert public.asked == [("example.com", 443)]
    for private in ("10.0.0.1", "::1", "fe80::1%2", "::ffff:127.0.0.1"):
        mixed = Names("8.8.8.8", private)
        with pytest.raises(RefusedTargetError, match=PERMIT):
            await resolve(url, mixed, executor, webhook_rules(allow_private=False))
        assert private in await resolve(url, mixed, executor, webhook_rules(allow_private=True))


async def test_names_that_do_not_resolve_are_reported(executor: ThreadPoolExecutor) -> None:
    with pytest.raises(socket.gaierror):
        await resolve(
            httpx.URL("http://x:81/"), Names(), executor, webhook_rules(allow_private=False)
        )
    many = Names(*(f"8.8.8.{n}" for n in range(50)))
    assert (
        len(
            await resolve(
                httpx.URL("http://x/"), many, executor, webhook_rules(allow_private=False)
            )
        )
        == 4
    )
