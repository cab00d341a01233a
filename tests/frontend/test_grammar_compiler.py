"""Grammars of any kind may break a compiler's process, but never this process."""

import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anyio
import psutil
import pytest
from llguidance import LLTokenizer
from transformers import AutoTokenizer

from enginepool import InvalidGrammar, PoolClosed, QueueFull, toy
from enginepool.dispatch.grammar import GrammarSource
from enginepool.frontend import grammar_compiler, grammar_trial
from enginepool.frontend.cancellation import in_thread
from enginepool.frontend.grammar_compiler import GrammarCompiler
from enginepool.frontend.grammar_helper import NobodyWaits
from enginepool.frontend.grammar_lane import Job, Lane
from enginepool.frontend.grammar_trial import Trial
from enginepool.frontend.tokenizer import Tokenizer
from tests.support.grammars import HOSTILE, form_of, without_end
from tests.support.liveness import SECONDS, until

MakeCompiler = Callable[[], GrammarCompiler]
FOREVER = GrammarSource.of("ebnf", without_end())


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(AutoTokenizer.from_pretrained(str(toy.checkpoint())))


@pytest.fixture
def make(tokenizer: Tokenizer) -> Iterator[MakeCompiler]:
    made: list[GrammarCompiler] = []

    def one() -> GrammarCompiler:
        made.append(GrammarCompiler(tokenizer, 272, {}, "tested"))
        return made[-1]

    yield one
    for compiler in made:
        compiler.close()


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Iterator[GrammarCompiler]:
    one = GrammarCompiler(tokenizer, 272, {}, "tested")
    yield one
    one.close()


@pytest.fixture
def unlimited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grammars have no time limit."""
    monkeypatch.setattr(grammar_compiler, "_SHORT_SECONDS", 1000.0)
    monkeypatch.setattr(grammar_compiler, "_SECONDS", 1000.0)


def children() -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process().children()
        if "enginepool.frontend.grammar_trial" in child.cmdline()
    ]


def assert_refused(compiler: GrammarCompiler, name: str) -> None:
    """The error has the limit and the remedy, and the next grammar compiles."""
    params, words = HOSTILE[name]
    with pytest.raises(InvalidGrammar) as caught:
        compiler.compile(GrammarSource.of(*form_of(params)))
    for word in words:
        assert word in str(caught.value)
    compiler.compile(GrammarSource.of("regex", f"[a-z]{{{len(name)}}}"))


@pytest.mark.parametrize("name", sorted(HOSTILE.keys() - {"rules"}))
def test_grammars_that_end_or_block_a_process_are_refused(
    compiler: GrammarCompiler, name: str
) -> None:
    assert_refused(compiler, name)


def test_a_grammar_that_overflows_the_stack_is_refused(unlimited: None, make: MakeCompiler) -> None:
    """On a slow machine its time might be refused first."""
    assert_refused(make(), "rules")


def test_a_slow_grammar_delays_no_other(
    make: MakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other grammars compile meanwhile."""
    monkeypatch.setattr(grammar_compiler, "_SECONDS", 1000.0)
    compiler = make()
    with ThreadPoolExecutor(2) as threads:
        forever = [
            threads.submit(compiler.compile, GrammarSource.of("ebnf", without_end(count)))
            for count in (29, 30)
        ]
        until(lambda: len(compiler.jobs) == 2)
        compiler.compile(GrammarSource.of("regex", "[ab]{3}"))
        assert not any(call.done() for call in forever)
        compiler.close()
        for call in forever:
            with pytest.raises(PoolClosed):
                call.result(SECONDS)


def test_a_grammar_that_comes_while_the_pool_closes(tokenizer: Tokenizer) -> None:
    """Its caller does not wait for ever."""

    class Closing(GrammarCompiler):
        """Another thread closes it when a caller has found the lane."""

        def _first_lane(self) -> Lane:
            lane = super()._first_lane()
            self.close()
            return lane

    raised: list[type] = []

    def compile_one() -> None:
        try:
            Closing(tokenizer, 272, {}, "tested").compile(GrammarSource.of("regex", "a"))
        except Exception as error:
            raised.append(type(error))

    caller = threading.Thread(target=compile_one, daemon=True)
    caller.start()
    caller.join(SECONDS)
    assert raised == [PoolClosed]


@pytest.mark.usefixtures("unlimited")
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_compilation_ends_with_its_last_caller(make: MakeCompiler, backend: str) -> None:
    compiler = make()
    jobs: list[Job] = []

    async def leave() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(in_thread, compiler.compile, FOREVER)
            group.start_soon(in_thread, compiler.compile, FOREVER)
            while not (compiler.jobs and compiler.jobs[FOREVER].waiting == 2 and children()):
                await anyio.sleep(0.01)
            jobs.extend(compiler.jobs.values())
            group.cancel_scope.cancel()

    anyio.run(leave, backend=backend)
    until(lambda: not compiler.jobs)
    (job,) = jobs
    assert isinstance(job.done.exception(SECONDS), NobodyWaits)
    compiler.compile(GrammarSource.of("regex", "[ab]{3}"))


@pytest.mark.usefixtures("unlimited")
def test_only_so_many_wait(make: MakeCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """One more is refused. Grammars that are compiled already are still available."""
    monkeypatch.setattr(grammar_compiler, "_MOST_WAIT", 2)
    compiler = make()
    known = GrammarSource.of("regex", "[ab]{3}")
    compiled = compiler.compile(known)
    with ThreadPoolExecutor(2) as threads:
        for count in (29, 30):
            source = GrammarSource.of("ebnf", without_end(count))
            threads.submit(compiler.compile, source)
        until(lambda: len(compiler.jobs) == 2)
        with pytest.raises(QueueFull, match="2 grammars are being compiled"):
            compiler.compile(GrammarSource.of("regex", "[ab]{4}"))
        assert compiler.compile(known) is compiled
        compiler.close()


def test_its_processes_end_with_it(make: MakeCompiler) -> None:
    """There is one process from the first grammar on. If it is ended from outside, another one
    replaces it."""
    others, threads = set(children()), threading.active_count()
    compiler = make()
    assert set(children()) == others
    compiler.compile(GrammarSource.of("regex", "a"))
    # Process ids wrap around, so the newest need not be the highest.
    (mine,) = set(children()) - others
    mine.kill()
    psutil.wait_procs([mine], SECONDS)
    compiler.compile(GrammarSource.of("regex", "b"))
    (another,) = set(children()) - others
    assert another != mine
    compiler.close()
    assert set(children()) == others
    assert threading.active_count() == threads
    with pytest.raises(PoolClosed):
        compiler.compile(GrammarSource.of("regex", "c"))


def test_a_host_that_is_killed_leaves_none() -> None:
    script = """
        import os, psutil
        from transformers import AutoTokenizer
        from enginepool import toy
        from enginepool.dispatch.grammar import GrammarSource
        from enginepool.frontend.grammar_compiler import GrammarCompiler
        from enginepool.frontend.tokenizer import Tokenizer

        tokenizer = Tokenizer(AutoTokenizer.from_pretrained(str(toy.checkpoint())))
        GrammarCompiler(tokenizer, 272, {}, "killed").compile(GrammarSource.of("regex", "a"))
        print(psutil.Process().children()[0].pid, flush=True)
        os.kill(os.getpid(), 9)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, check=False
    )
    assert done.returncode == -9
    helper = int(done.stdout)
    until(lambda: not psutil.pid_exists(helper) or _is_dead(helper))


def _is_dead(pid: int) -> bool:
    try:
        return (
            psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        )  # of the process that adopted it
    except psutil.NoSuchProcess:
        return True


def test_there_is_no_jax_where_grammars_are_tried() -> None:
    script = (
        "import sys, enginepool.frontend.grammar_trial; "
        "print({'jax', 'sgl_jax', 'transformers', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, check=True
    )
    assert done.stdout.strip() == "set()"


def test_grammars_are_kept_by_their_size(make: MakeCompiler) -> None:
    """The size that their states have reached counts. The least recently used ones are dropped
    first."""
    compiler = make()
    sources = [GrammarSource.of("regex", f"[ab]{{{number}}}") for number in range(1, 4)]
    old, large, new = (compiler.compile(source) for source in sources)
    assert 0 < old.nbytes < 1 << 20
    large.seconds += 0.9
    compiler.compile(sources[0])
    new.seconds += 0.9
    assert compiler.compile(sources[0]) is old
    assert compiler.compile(sources[2]) is new
    assert list(compiler.kept) == [sources[0], sources[2]]
    new.seconds += 0.9
    compiler.compile(sources[0])
    compiler.compile(sources[2])
    assert compiler.compile(sources[2]) is not new


def test_schemas_of_every_depth_that_is_allowed(compiler: GrammarCompiler) -> None:
    """Chains of every kind. The longest one that is accepted does not overflow the stack."""
    links: list[Callable[[dict[str, Any]], dict[str, Any]]] = [
        lambda one: one,
        lambda one: {"anyOf": [one, {"type": "null"}]},
        lambda one: {"type": "array", "items": one},
        lambda one: {"type": "object", "properties": {"a": one}},
        lambda one: {"allOf": [one, {"type": "integer"}]},
    ]
    for link in links:
        said = []
        for count in (60, 80, 120, 250, 300):
            chain = {f"d{i}": link({"$ref": f"#/$defs/d{i + 1}"}) for i in range(count)}
            schema = {"$defs": {f"d{count}": {"type": "integer"}, **chain}, "$ref": "#/$defs/d0"}
            try:
                compiler.compile(GrammarSource.of("json_schema", schema))
                said.append("")
            except InvalidGrammar as error:
                said.append(str(error))
        assert said[:2] == ["", ""]
        assert "chain of more than 256" in said[-1]
        assert all("chain of more than 256" in one for one in said if one)


def test_bytes_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes of a compiled grammar, without its own process."""
    text = (toy.checkpoint() / "tokenizer.json").read_text(encoding="utf-8")
    trial = Trial(LLTokenizer(text, n_vocab=272, eos_token=258), {}, 1000.0)
    assert trial.answer("regex", "[ab]{3}")["bytes"] > 1000
    monkeypatch.setattr(grammar_trial, "MOST_BYTES", 1000)
    assert "at most 0 MiB are kept; make it smaller" in trial.answer("regex", "[ab]{3}")["error"]
