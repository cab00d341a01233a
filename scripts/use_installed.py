"""Use an installed enginepool as its users do, and exit with 1 if something does not work.

For scripts/try-wheel: run by the environment's Python, in an empty folder. It imports nothing of
the package; each use is a process of its own, as it is for users.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

BIN = Path(sys.executable).parent
SECONDS = 300.0
FIRST_EXAMPLE = """
from enginepool import EnginePool
import enginepool
for result in EnginePool(devices=4).generate_all(["12+7=", "30+4="]):
    print(result["text"], result["meta_info"]["engine_index"])
print(enginepool.__file__)
"""


def main() -> None:
    os.environ.update(JAX_PLATFORMS="cpu", HF_HUB_OFFLINE="1")
    python, enginepool = str(BIN / "python"), str(BIN / "enginepool")
    printed = told(python, "-c", FIRST_EXAMPLE).splitlines()
    expect([line.split()[0] for line in printed[:2]] == ["19", "34"], printed)
    expect(Path(printed[2]).is_relative_to(BIN.parent), printed[2])
    expect("zero_penalty_cache" in told(python, "-m", "patches"), "no table of patches")
    expect("jax" in json.loads(told(enginepool, "doctor", "--json")), "doctor")
    expect("Closed:" in told(python, "-m", "enginepool.cli", "demo"), "the demo did not end")
    expect("19" in told(enginepool, "generate", "12+7=", "--devices", "1"), "generate")
    serve(enginepool)
    print("README's first example, patches, doctor, the demo, generate and serve work.", flush=True)


def serve(enginepool: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with tempfile.TemporaryFile("w+") as log:
        command = [enginepool, "serve", "--devices", "1", "--port", str(port)]
        server = subprocess.Popen(command, stderr=log)
        try:
            ask(server, f"http://127.0.0.1:{port}")
            server.send_signal(signal.SIGTERM)
            expect(server.wait(SECONDS) == 0, "the server did not end well")
        except BaseException:
            log.seek(0)
            print(log.read(), file=sys.stderr)
            raise
        finally:
            server.kill()
            server.wait()


def ask(server: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            urllib.request.urlopen(f"{url}/ready", timeout=10).close()
            break
        except (urllib.error.URLError, OSError):
            expect(server.poll() is None and time.monotonic() < deadline, "the server is not ready")
            time.sleep(0.2)
    chat = {"model": "toy", "messages": [{"role": "user", "content": "12+7="}], "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        data=json.dumps(chat).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        answer = json.load(reply)["choices"][0]["message"]["content"]
    expect(answer == "19", answer)
    for page in ("/", "/docs"):
        with urllib.request.urlopen(f"{url}{page}", timeout=60) as reply:
            expect(b"<html" in reply.read(), page)


def told(*command: str) -> str:
    """What a command prints; it must end with 0."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    expect(done.returncode == 0, f"{command}: {done.stdout}{done.stderr}")
    return done.stdout


def expect(right: object, what: object) -> None:
    if not right:
        raise SystemExit(f"does not work: {what}")


if __name__ == "__main__":
    main()
