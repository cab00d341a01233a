"""What every patch does: apply, revert, refuse."""

import inspect
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

import patches
from enginepool import EnginePoolError, PatchFailed
from enginepool.runtime import startup
from patches import _patch, batch_transfers, seeded_sampler, zero_penalty_cache

EACH = pytest.mark.parametrize("patch", patches.ALL, ids=lambda patch: patch.name)
HEADINGS = ("What breaks:", "Why:", "What we change:", "Remove when:")


def bound(patch):
    """Return what is stored at the targets of the patch."""
    return [vars(target.holder()).get(target.name) for target in patch.replaced]


def needed(patch):
    """Return the patch if this upstream needs it. The patch's own tests show why it does not."""
    if not patch.is_needed():
        pytest.skip(f"the installed upstream does not need {patch.name}")
    return patch


def test_importing_changes_nothing():
    """`import patches` imports neither upstream nor jax."""
    script = "import sys, patches; print(sorted({'jax', 'sgl_jax'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.mark.slow
def test_applying_starts_no_backend():
    """Neither probing nor applying initialises JAX, so the host may still choose its devices."""
    script = (
        "import patches; patches.apply(); "
        "from jax._src import xla_bridge; "
        "print(xla_bridge.backends_are_initialized())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "False\n")


@EACH
def test_apply_and_revert(patch):
    """Both can be repeated. A revert restores the identical objects."""
    needed(patch)
    before = bound(patch)
    assert patches.apply([patch]) == [patch]
    assert patches.is_applied(patch)
    applied = bound(patch)
    assert all(now is not then for now, then in zip(applied, before, strict=True))
    assert patches.apply([patch]) == []
    assert all(now is then for now, then in zip(bound(patch), applied, strict=True))
    patches.revert([patch])
    patches.revert([patch])
    assert not patches.is_applied(patch)
    assert all(now is then for now, then in zip(bound(patch), before, strict=True))


@EACH
def test_the_signature_stays(patch):
    """A replaced function keeps its name, its signature and its docstring."""
    before = [inspect.unwrap(getattr(b, "__func__", b)) for b in bound(needed(patch))]
    patches.apply([patch])
    for original, now in zip(before, bound(patch), strict=True):
        if callable(original):
            function = getattr(now, "__func__", now)
            assert inspect.signature(function) == inspect.signature(original)
            assert (function.__name__, function.__doc__) == (original.__name__, original.__doc__)


@EACH
def test_is_needed_tells_about_the_original(patch):
    """The answer is the same while the patch is applied."""
    before = patch.is_needed()
    patches.apply()
    assert patch.is_needed() == before


@EACH
def test_the_module_says_what_and_why(patch):
    """Each module's docstring has its four headings, and the patch carries the module's name."""
    doc = sys.modules[f"patches.{patch.name}"].__doc__
    positions = [doc.index(f"\n{heading}") for heading in HEADINGS]
    assert positions == sorted(positions)


def test_apply_returns_what_it_applied():
    """All patches that are needed, and none the second time. A revert undoes all."""
    assert patches.apply() == patches.needed()
    assert patches.apply() == []
    patches.revert()
    assert not any(map(patches.is_applied, patches.ALL))


def test_what_is_not_needed_is_left_alone():
    """A patch that the installed upstream does not need changes nothing, even if it is named."""
    before = bound(zero_penalty_cache.PATCH)
    assert patches.apply([zero_penalty_cache.PATCH]) == []
    assert bound(zero_penalty_cache.PATCH) == before


def test_no_two_patches_replace_the_same():
    """Each target belongs to one patch, so each patch can be reverted alone."""
    targets = [target.path for patch in patches.ALL for target in patch.replaced]
    assert len(targets) == len(set(targets))


def test_threads_apply_once():
    """If many threads apply at once, each patch is applied by exactly one."""
    with ThreadPoolExecutor(8) as executor:
        results = [executor.submit(patches.apply) for _ in range(8)]
        applied = [patch for result in results for patch in result.result()]
    assert sorted(p.name for p in applied) == sorted(p.name for p in patches.needed())


def test_revert_refuses_when_patched_again(monkeypatch):
    """Code that somebody else put over the patch is not thrown away."""
    patch = seeded_sampler.PATCH
    [target] = patch.replaced
    patches.apply([patch])
    with monkeypatch.context() as context:
        context.setattr(target.holder(), target.name, lambda operands: None)
        with pytest.raises(patches.PatchError, match="multinomial_with_seed: was patched again"):
            patches.revert()
        assert patches.is_applied(patch)
    patches.revert()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attribute": "gone"}, "has no gone"),
        ({"attribute": "Gone.method"}, "has no Gone"),
        ({"parameters": ("logits",)}, r"expected parameters \(logits\), found \(operands\)"),
        ({"attribute": "np", "parameters": ()}, "expected a function, found <module 'numpy'"),
    ],
)
def test_an_unknown_upstream_is_refused(changes, message):
    """A target that is missing or has changed is named, and nothing stays applied."""
    [target] = seeded_sampler.PATCH.replaced
    unknown = replace(seeded_sampler.PATCH, replaced=(replace(target, **changes),))
    with pytest.raises(patches.PatchError, match=message):
        patches.apply([patches.ALL[1], unknown])
    assert not patches.is_applied(patches.ALL[1])


@pytest.mark.parametrize(
    ("patch", "target"),
    [
        pytest.param(patch, target, id=f"{patch.name} {target.attribute}")
        for patch in patches.ALL
        for target in patch.replaced
        if not target.inherited
    ],
)
def test_a_part_of_upstream_that_is_gone(patch, target, monkeypatch, caplog):
    """It is named in an error, or in the log if only speed is lost. A patch whose target other
    versions do not have is not needed."""
    monkeypatch.setattr(_patch, "_left_out", set())
    with pytest.MonkeyPatch.context() as gone:
        gone.delattr(target.holder(), target.name, raising=not target.optional)
        if target.optional or patch.optimisation or target.module.startswith("jax."):
            assert patches.apply([patch]) == []
        else:
            with pytest.raises(patches.PatchError, match=re.escape(target.path)):
                patches.apply([patch])
    said = [record.getMessage() for record in caplog.records]
    left_out = not target.optional and (patch.optimisation or target.module.startswith("jax."))
    assert len(said) == left_out
    assert all(line.startswith(f"{patch.name} is left out: {target.path}") for line in said)
    assert not patches.is_applied(patch)


def test_an_optimisation_whose_probe_trips_is_left_out(monkeypatch, caplog):
    """Upstream sends a batch in another way, which is no error."""
    monkeypatch.setattr(_patch, "_left_out", set())
    other = replace(batch_transfers.PATCH, probe=lambda *originals: originals[0].gone)
    assert not other.is_needed()
    assert not other.is_needed()
    [record] = caplog.records
    assert record.getMessage().startswith("batch_transfers is left out: batch_transfers: cannot")


def test_a_probe_that_trips_is_an_error():
    """If upstream's code fails under the probe, the patch does not guess."""
    broken = replace(seeded_sampler.PATCH, probe=lambda original: original(None))
    with pytest.raises(patches.PatchError, match="seeded_sampler: cannot tell"):
        broken.is_needed()


def test_the_table():
    """One row per patch, with targets, issue, and whether it is needed here."""
    plain = patches.table()
    rows = [line for line in plain.splitlines()[2:] if not line.startswith(" ")]
    for patch, row in zip(patches.ALL, rows, strict=True):
        assert row.startswith(f"{patch.name} ")
        assert f" {patch.issue} " in row
        assert row.endswith(" yes" if patch.is_needed() else " no")
    assert all(
        target.removeprefix("sgl_jax.srt.") in plain for p in patches.ALL for target in p.targets
    )


def test_the_command():
    """`python -m patches` prints the table."""
    command = [sys.executable, "-m", "patches"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == patches.table() + "\n"


def unknown_upstream() -> patches.Patch:
    """A patch whose target the installed upstream does not have."""
    [target] = seeded_sampler.PATCH.replaced
    return replace(seeded_sampler.PATCH, replaced=(replace(target, attribute="gone"),))


@pytest.fixture
def no_pool_open(monkeypatch):
    """As in a process that has just started, although other tests keep pools open."""
    monkeypatch.setattr(startup, "_open_pools", 0)
    monkeypatch.setattr(startup, "_applied", [])


def test_after_a_pool_that_could_not_open_the_next_gets_its_patches(no_pool_open, monkeypatch):
    """A pool that could not open because of a patch does not count. The next one applies all
    patches, and reverts them when it closes. The error is enginepool's own and names the place."""
    with monkeypatch.context() as context:
        context.setattr(patches, "ALL", (*patches.ALL, unknown_upstream()))
        with pytest.raises(EnginePoolError, match="has no gone") as caught, startup.patched():
            pytest.fail("it opened")
    assert isinstance(caught.value, PatchFailed)
    assert isinstance(caught.value.__cause__, patches.PatchError)
    with startup.patched():
        assert all(map(patches.is_applied, patches.needed()))
    assert not any(map(patches.is_applied, patches.ALL))


def test_the_next_pool_reverts_patches_that_one_could_not(no_pool_open, monkeypatch):
    """Somebody patched over a patch. When they have undone it, the next pool that closes
    restores upstream."""
    [target] = seeded_sampler.PATCH.replaced
    with (
        monkeypatch.context() as context,
        pytest.raises(PatchFailed, match="was patched again"),
        startup.patched(),
    ):
        context.setattr(target.holder(), target.name, lambda operands: None)
    assert patches.is_applied(seeded_sampler.PATCH)
    with startup.patched():
        pass
    assert not any(map(patches.is_applied, patches.ALL))


def test_reader_that_leaves_ends_the_command_quietly():
    """As with `head`. The process ends as SIGPIPE ends any program."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "patches"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, "")
