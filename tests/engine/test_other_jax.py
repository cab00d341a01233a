"""If JAX's private parts have moved, a pool is slower and still works."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import jax
import pytest
from jax._src import cache_key, compiler

import patches
from enginepool import InvalidConfig, toy
from enginepool.devices import resolve_devices
from enginepool.engine import executable_cache
from enginepool.engine.executable_cache import ExecutableCache
from patches import _patch, batch_transfers, compile_cache
from tests.support.liveness import SECONDS
from tests.support.pools import SMALL

# JAX and upstream still find these parts. Only our code does not.
SCRIPT = """
import builtins, importlib, json, logging, sys

find, find_late = builtins.__import__, importlib.import_module

def check(name, importer):
    if name.startswith("jax._src") and importer.split(".")[0] in ("enginepool", "patches"):
        missed.append(importer)
        raise ModuleNotFoundError(f"No module named {name!r}")

def import_(name, globals=None, locals=None, fromlist=(), level=0):
    check(name, (globals or {}).get("__name__") or "")
    return find(name, globals, locals, fromlist, level)

def import_module(name, package=None):
    check(name, sys._getframe(1).f_globals["__name__"])
    return find_late(name, package)

missed, said = [], []
builtins.__import__, importlib.import_module = import_, import_module
listener = logging.Handler(logging.WARNING)
listener.emit = lambda record: said.append(record.getMessage())

import enginepool
at_import = list(missed)
for name in ("enginepool", "patches"):
    logging.getLogger(name).addHandler(listener)
with enginepool.EnginePool(sys.argv[1], devices=1, **json.loads(sys.argv[2])) as pool:
    text = pool.generate("12+7=")["text"]
    shared = pool.stats()["executables"]
import patches
print(json.dumps({
    "text": text,
    "at import": at_import,
    "missed": sorted(set(missed)),
    "said": said,
    "shared": shared,
    "unknown": [line for line in patches.table().splitlines() if "unknown" in line],
}))
"""


OPTIONS = SMALL | {"warmup": "none"}


@pytest.mark.slow
def test_a_pool_opens_and_answers() -> None:
    """Without any of these parts `import enginepool` works. A pool opens and answers, and logs a
    line for each optimisation that it leaves out."""
    command = [sys.executable, "-c", SCRIPT, str(toy.checkpoint()), json.dumps(OPTIONS)]
    on = os.environ | {"ENGINEPOOL_OPTIMISATIONS": "1"}  # the optimisations reach into JAX
    done = subprocess.run(command, capture_output=True, text=True, timeout=3 * SECONDS, env=on)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert report["text"] == "19"
    assert report["at import"] == []
    assert {"enginepool.engine.executable_cache", "patches._lookup"} <= set(report["missed"])
    assert report["shared"] == {"compiled": 0, "reused": 0}
    assert len(report["said"]) == len(set(report["said"]))
    assert sum("executables_not_shared" in line for line in report["said"]) == 1
    assert sum(line.startswith("batch_transfers is left out") for line in report["said"]) == 1
    assert report["unknown"] == []


@pytest.fixture
def as_new(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Parts of JAX that were found before are looked for again, now and afterwards."""
    executable_cache._jax.cache_clear()
    monkeypatch.setattr(_patch, "_left_out", set())
    yield monkeypatch
    monkeypatch.undo()
    executable_cache._jax.cache_clear()


@pytest.mark.parametrize(
    ("module", "name", "value"),
    [
        (compiler, "backend_compile_and_load", None),
        (compiler, "backend_compile_and_load", lambda backend, module, devices: None),
        (cache_key, "_hash_computation", None),
        (cache_key, "_hash_serialized_compile_options", lambda digest, options: None),
        (cache_key, "_hash_computation", lambda digest, module, something: None),
    ],
)
def test_executables_are_not_shared(
    as_new: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, module: Any, name: str, value: Any
) -> None:
    """A function that is gone or has other parameters is left as it is. The log says so once."""
    if value is None:
        as_new.delattr(module, name)
    else:
        as_new.setattr(module, name, value)
    found = getattr(compiler, "backend_compile_and_load", None)
    with caplog.at_level(logging.WARNING, logger="enginepool"):
        for _ in range(2):
            with ExecutableCache().sharing():
                assert getattr(compiler, "backend_compile_and_load", None) is found
    assert [record.getMessage() for record in caplog.records] == [
        "enginepool.executables_not_shared"
    ]


@pytest.mark.parametrize(
    ("patch", "place"),
    [
        (batch_transfers.PATCH, "jax._src.interpreters.pxla.batched_device_put"),
        (compile_cache.PATCH, "jax._src.compiler._get_cache_key"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
@pytest.mark.parametrize("gone", [True, False])
def test_a_patch_of_jax_is_left_out(
    as_new: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    patch: patches.Patch,
    place: str,
    gone: bool,
) -> None:
    """The pool does not need it, and the log gives the reason once. Missing parts of upstream
    are an error."""
    if not patch.is_needed() and patch is compile_cache.PATCH:
        pytest.skip("this upstream does not need it in any case")
    as_new.setattr(_patch, "_applied", {})  # as if no pool were open
    if gone:
        as_new.delattr(place)
    else:
        as_new.setattr(place, lambda something, else_: None)
    with caplog.at_level(logging.WARNING, logger="patches"):
        assert patches.apply([patch]) == []
        assert not patch.is_needed()
    [record] = caplog.records
    assert record.getMessage().startswith(f"{patch.name} is left out: {place}")


def test_a_count_of_devices_after_jax_has_started(as_new: pytest.MonkeyPatch) -> None:
    """JAX is asked for virtual devices by its public configuration only, which then refuses."""
    assert len(jax.devices()) == 4  # it has started
    as_new.delenv("XLA_FLAGS", raising=False)
    before = jax.config.jax_num_cpu_devices  # pyright: ignore[reportAttributeAccessIssue]
    assert [device.id for [device] in resolve_devices(3, 1)] == [0, 1, 2]
    with pytest.raises(InvalidConfig, match="5 devices are needed and JAX has 4"):
        resolve_devices(5, 1)
    assert jax.config.jax_num_cpu_devices == before  # pyright: ignore[reportAttributeAccessIssue]
