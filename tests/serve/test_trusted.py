"""Trusted addresses need no token. All others do."""

import asyncio

import httpx
import pytest
from starlette.responses import PlainTextResponse

from enginepool.errors import InvalidConfig
from enginepool.serve.auth import Guard
from enginepool.serve.error_replies import error_reply
from enginepool.serve.options import ServeOptions

NETWORK = ("10.1.0.0/16", "fd00::7")


def status(options: ServeOptions, address: str, headers: dict[str, str] | None = None) -> int:
    """The status of an administrator's call from there."""
    guard = Guard(
        PlainTextResponse("ok"), options, frozenset({"/pause"}), lambda _, why: error_reply(why)
    )
    transport = httpx.ASGITransport(guard, client=(address, 5000))

    async def call() -> int:
        async with httpx.AsyncClient(transport=transport, base_url="http://pool:30000") as client:
            return (await client.post("/pause", headers=headers)).status_code

    return asyncio.run(call())


@pytest.mark.parametrize(
    ("address", "code"),
    [
        ("10.1.2.3", 200),
        ("::ffff:10.1.2.3", 200),
        ("fd00::7", 200),
        ("10.2.0.1", 403),
        ("fd00::8", 403),
        ("127.0.0.1", 403),  # to a host of another name
        ("", 403),
    ],
)
def test_addresses(address: str, code: int) -> None:
    options = ServeOptions(host="0.0.0.0", enable_admin=True, trusted_admins=NETWORK)
    assert status(options, address) == code


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://pool:30000"},
        {"X-Forwarded-For": "10.1.2.3"},
        {"Via": "1.1 proxy"},
        {"Accept-Language": "en"},  # the only sign of a page whose host name was rebound
    ],
)
def test_browsers_and_proxies_there(headers: dict[str, str]) -> None:
    options = ServeOptions(host="0.0.0.0", enable_admin=True, trusted_admins=NETWORK)
    assert status(options, "10.1.2.3", headers) == 403


def test_trusted_addresses_with_a_token() -> None:
    """Requests from trusted addresses may also bring the token."""
    options = ServeOptions(
        host="0.0.0.0", enable_admin=True, trusted_admins=NETWORK, admin_token="secret"
    )
    token = {"Authorization": "Bearer secret"}
    assert status(options, "10.1.2.3") == 200
    assert status(options, "10.2.0.1") == 401
    assert status(options, "10.2.0.1", token) == 200
    assert status(options, "10.1.2.3", {"Origin": "http://x"}) == 401


def test_trusted_addresses_with_an_api_key() -> None:
    """The API key is required for every call, also for this one."""
    options = ServeOptions(host="0.0.0.0", enable_admin=True, trusted_admins=NETWORK, api_key="key")
    assert status(options, "10.1.2.3") == 401
    assert status(options, "10.1.2.3", {"Authorization": "Bearer key"}) == 200


@pytest.mark.parametrize("address", ["pool.example", "10.1.2.3/16", "0.0.0.0/0", "::/0", ""])
def test_invalid_trusted_addresses(address: str) -> None:
    with pytest.raises(InvalidConfig, match="--trusted-admins"):
        ServeOptions(host="0.0.0.0", enable_admin=True, trusted_admins=(address,))
    with pytest.raises(InvalidConfig, match="--enable-admin"):
        ServeOptions(trusted_admins=("10.1.2.3",))
