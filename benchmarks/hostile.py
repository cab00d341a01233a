"""How long a chat takes while another client attacks the server, and how long without.

    python -m benchmarks.hostile --seconds 10

The server has the toy and is a process of its own. One client sends one chat after the other. The
attacker is a third process (`hostile_client.py`). It sends the same body again and again, two at a
time, or holds connections. All of them share this machine's cores, so an attacker's work also slows
the server.

The client asks `/health` as well. After each attack the memory of the server and its helpers is
compared with that before the first. Exits with 1 if `/health` took more than a second, or if the
memory grew by more than a gigabyte.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

import httpx
import psutil

from benchmarks.command import CORES, arguments, plain, write_json
from benchmarks.hostile_client import BODIES, CHAT, CONNECTIONS, SUM
from benchmarks.serving import flags, server
from enginepool import toy

_BEGIN = 1.0  # seconds until an attack is under way
_HEALTH_SECONDS = 1.0
_GROWTH = 1 << 30


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments("hostile", __doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each attack")
    parser.add_argument("--attacks", nargs="+", default=[*BODIES, *CONNECTIONS])
    parser.add_argument("--devices", type=int, default=2)
    options = parser.parse_args(argv)
    command = [sys.executable, "-m", "enginepool.cli", "serve", str(toy.checkpoint())]
    command += ["--devices", str(options.devices), *flags()]
    rows: dict[str, dict[str, list[float]]] = {}
    with server(command) as url, httpx.Client(base_url=url, timeout=600) as client:
        _chats(client, 2.0)
        before = _memory()
        rows["quiet"] = _chats(client, options.seconds)
        for attack in options.attacks:
            rows[attack] = _beside(url, attack, client, options.seconds)
            _chats(client, 1.0)
            rows[attack]["grown"] = [_memory() - before]
        rows["quiet again"] = _chats(client, options.seconds)
        rows["quiet again"]["grown"] = [_memory() - before]
    print(f"a chat of 3 tokens, ms, on {CORES} cores with the attacker beside it:")
    quiet = statistics.median(rows["quiet"]["chats"])
    plain(
        ("", "chats", "median", "longest", "median to quiet's", "longest /health", "MB more"),
        [
            [name, len(row["chats"]), *_ms(statistics.median(row["chats"]), max(row["chats"])),
             f"{statistics.median(row['chats']) / quiet:.1f}", *_ms(max(row["health"])),
             f"{row.get('grown', [0])[0] / 1e6:.0f}"]
            for name, row in rows.items()
        ],
    )  # fmt: skip
    write_json(options, rows=rows)
    late = max(max(row["health"]) for row in rows.values()) > _HEALTH_SECONDS
    return int(late or max(row.get("grown", [0])[0] for row in rows.values()) > _GROWTH)


def _memory() -> int:
    """Bytes of the server and its processes."""
    (one,) = (child for child in psutil.Process().children() if "serve" in child.cmdline())
    return sum(each.memory_info().rss for each in (one, *one.children(recursive=True)))


def _beside(url: str, attack: str, client: httpx.Client, seconds: float) -> dict[str, list[float]]:
    attacker = subprocess.Popen([sys.executable, "-m", "benchmarks.hostile_client", url, attack])
    try:
        _chats(client, _BEGIN)
        times = _chats(client, seconds)
        if attacker.poll() is not None:
            raise RuntimeError(f"the attacker with {attack} ended by itself")
        return times
    finally:
        attacker.terminate()
        attacker.wait()


def _chats(client: httpx.Client, seconds: float) -> dict[str, list[float]]:
    """Seconds of chats, one after the other, and of `/health` before each."""
    times: list[float] = []
    health: list[float] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or not times:
        began = time.perf_counter()
        client.get("/health").raise_for_status()
        health.append(time.perf_counter() - began)
        began = time.perf_counter()
        reply = client.post(CHAT, json={"model": "toy", "messages": SUM, "temperature": 0})
        times.append(time.perf_counter() - began)
        if reply.json()["choices"][0]["message"]["content"] != "19":
            raise RuntimeError(f"the chat was not answered: {reply.text[:300]}")
    return {"chats": times, "health": health}


def _ms(*seconds: float) -> list[str]:
    return [f"{1000 * one:.0f}" for one in seconds]


if __name__ == "__main__":
    raise SystemExit(main())
