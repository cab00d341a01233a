"""Any value for any parameter: the call is answered, or InvalidRequest says why not and nothing
has started."""

import math
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import anyio
import jax.numpy as jnp
import numpy as np
import pytest

from enginepool import EnginePool, InvalidConfig, InvalidRequest, InvalidWeights
from enginepool.frontend.sampling import NAMES
from enginepool.values import is_int, is_number, plain
from tests.pool.test_bad_input import GREEDY, IDS, refused
from tests.support.liveness import at_rest, until

VERBS = ("generate", "generate_all", "stream", "as_completed", "chat")
MESSAGES = [{"role": "user", "content": "12+7="}]


def hostile() -> Iterator[Any]:
    """Values of every kind. Few of them are valid."""
    yield from (None, math.nan, math.inf, -math.inf, True, False, "yes", "", "\ud800", b"no", 1j)
    yield from (10**400, -(10**5000), -1, 0, 1.5, 5e-324, 1e300, Decimal(1), object(), int, len)
    yield from ([], [[]], [None], [True], [[[1]]], (), {}, {"a": 1}, {5: 1}, {1}, range(0))
    yield from (np.float32("nan"), np.float64("inf"), np.int64(-1), np.uint64(2**64 - 1))
    yield from (np.array([]), np.array("x"), np.array([None, {}]), np.ma.masked, np.zeros((2, 0)))
    yield from (np.datetime64("now"), jnp.array(math.nan), jnp.zeros((1, 1, 1)))
    deleted = jnp.arange(3)
    deleted.delete()
    yield deleted
    endless: list[Any] = []
    endless.append(endless)
    yield endless


class Asked:
    """Calls whose values may be refused.

    Attributes:
        outputs: How many outputs answered calls had.
    """

    def __init__(self) -> None:
        self.outputs = 0

    def __call__(self, call: Callable[[], Any]) -> bool:
        """Whether it was answered. If not, it must raise an InvalidRequest of readable length."""
        message = ""
        try:
            results = call()
        except InvalidRequest as error:
            message = str(error)
        else:
            self.outputs += 1 if isinstance(results, dict) else len(results)
        assert len(message) < 2000
        return not message


@pytest.fixture
def ask(pool: EnginePool) -> Iterator[Asked]:
    """Afterwards, refused calls have left nothing in the pool, its counts or its engines."""

    def ended() -> int:
        stats = pool.stats()
        return stats["finished"] + stats["aborted"]

    asked, before = Asked(), ended()
    yield asked
    until(lambda: at_rest(pool))
    assert ended() == before + asked.outputs


@pytest.mark.parametrize("name", NAMES)
def test_sampling_parameters(pool: EnginePool, ask: Asked, name: str) -> None:
    """None leaves a parameter out. Other values that are not valid are refused."""
    for value in hostile():
        params = {**GREEDY, name: value}
        answered = ask(lambda params=params: pool.generate(input_ids=IDS, sampling_params=params))
        assert answered or value is not None


@pytest.mark.parametrize(
    "name",
    ["prompts", "input_ids", "sampling_params", "return_logprob", "top_logprobs_num", "timeout",
     "raise_on_error", "progress", "return_prompt_logprob", "logprob_start_len",
     "token_ids_logprob"],
)  # fmt: skip
def test_arguments(pool: EnginePool, ask: Asked, name: str) -> None:
    """The arguments of a call itself."""
    for value in hostile():
        given: dict[str, Any] = {"sampling_params": GREEDY, name: value}
        if name != "prompts":
            given.setdefault("input_ids", [IDS])
        if name == "logprob_start_len":
            given["return_prompt_logprob"] = True
        ask(lambda given=given: pool.generate_all(**given))
        if name not in ("prompts", "progress"):
            ask(lambda given=given: pool.generate(**given))
            if name != "raise_on_error":
                ask(lambda given=given: list(pool.as_completed(**given)))


@pytest.mark.parametrize(
    "name",
    ["prompts", "continuations", "input_ids", "continuation_ids", "top_logprobs_num", "timeout",
     "raise_on_error", "token_ids_logprob"],
)  # fmt: skip
def test_score(pool: EnginePool, ask: Asked, name: str) -> None:
    for value in hostile():
        given: dict[str, Any] = {name: value}
        if name != "prompts":
            given.setdefault("input_ids", [IDS])
        if name != "continuations":
            given.setdefault("continuation_ids", [IDS])
        ask(lambda given=given: pool.score(**given))


@pytest.mark.parametrize("name", ["messages", "chat_template_kwargs", "content"])
def test_chat(pool: EnginePool, ask: Asked, name: str) -> None:
    """Conversations, their contents, and what goes to the template."""
    for value in hostile():
        given: dict[str, Any] = {"messages": MESSAGES, "sampling_params": GREEDY, name: value}
        if name == "content":
            given["messages"] = [{"role": "user", "content": given.pop("content")}]
        ask(lambda given=given: pool.chat(**given))


def test_steering(pool: EnginePool) -> None:
    """Aborts and pauses refuse values that are no id or mode. `close` refuses values that are no
    time, and does not close."""
    for value in hostile():
        if not (isinstance(value, (str, np.ndarray)) or value is None):
            refused(pool, lambda v=value: pool.abort_request(v), "rid=", prompt=None)
        if not isinstance(value, bool):
            expected = "abort_all" if value is not None else "rid"
            refused(pool, lambda v=value: pool.abort_request(abort_all=v), expected, prompt=None)
        refused(pool, lambda v=value: pool.pause_generation(v), "mode=", prompt=None)
        if not (plain(value) is None or is_number(plain(value))):
            refused(pool, lambda v=value: pool.close(v), "timeout=", prompt=None)
    assert not pool.closed
    assert {engine["state"] for engine in pool.stats()["engines"]} == {"serving"}


UPDATES: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("strict", "copy", "free_kv"), lambda value: isinstance(value, bool | None)),
    **dict.fromkeys(("mode", "strategy", "staging"), lambda _: False),
    "weight_version": lambda value: value is None or isinstance(value, str) or is_int(value),
}


@pytest.mark.parametrize("name", UPDATES)
def test_updates(pool: EnginePool, name: str) -> None:
    """Options of an update. What is valid gets as far as the source, which is none."""
    for value in hostile():
        kind = InvalidWeights if UPDATES[name](plain(value)) else InvalidRequest
        with pytest.raises(kind, match=f"{name}=" if kind is InvalidRequest else "cannot read"):
            pool.update_weights(object(), **{name: value})


def test_other_calls_about_weights(pool: EnginePool) -> None:
    for value in hostile():
        calls: dict[str, tuple[Callable[[Any], Any], bool]] = {
            "seed=": (lambda v: pool.perturb_weights(seed=v), is_int(plain(value))),
            "scale=": (lambda v: pool.perturb_weights(scale=v), is_number(plain(value))),
            "num_leaves=": (lambda v: pool.perturb_weights(num_leaves=v), is_int(plain(value))),
            "name=": (pool.get_weights_by_name, isinstance(value, str | np.ndarray)),
            "truncate_size=": (lambda v: pool.get_weights_by_name("x", v), is_int(plain(value))),
            "tags=": (pool.release_memory_occupation, False),
        }
        for name, (call, may_be_valid) in calls.items():
            if not may_be_valid:
                refused(pool, lambda call=call, v=value: call(v), name, prompt=None)


def test_engines_own_generate(pool: EnginePool, ask: Asked) -> None:
    """The same through upstream's Engine."""
    engine = pool.engines[0]
    for name in ("prompt", "input_ids", "sampling_params", "return_logprob", "top_logprobs_num",
                 "logprob_start_len", "token_ids_logprob"):  # fmt: skip
        for value in hostile():
            given: dict[str, Any] = {"sampling_params": GREEDY, name: value}
            if name != "prompt":
                given.setdefault("input_ids", IDS)
            ask(lambda given=given: engine.generate(**given))


@pytest.mark.parametrize("value", list(hostile()), ids=lambda value: type(value).__name__)
def test_constructor(value: Any) -> None:
    """The pool's own options are refused by name, before anything starts."""
    for name in ("tp_size", "max_restarts", "max_queued", "step_timeout", "restart", "tune_host",
                 "progress", "warmup", "when_full", "max_decode_steps"):  # fmt: skip
        message = name
        try:
            EnginePool(**{name: value})
        except InvalidConfig as error:
            message = str(error)
        assert name in message


# Names


SLIPS: list[tuple[dict[str, Any], list[str]]] = [
    ({"temperature": 0}, ['sampling_params={"temperature": 0}']),
    ({"max_new_tokens": 8}, ['sampling_params={"max_new_tokens": 8}']),
    ({"max_tokens": 8}, ['did you mean sampling_params={"max_new_tokens": 8}?']),
    ({"seed": 1}, ['did you mean sampling_params={"sampling_seed": 1}?']),
    ({"timeuot": 3}, ["timeuot=3", "did you mean timeout=?"]),
    ({"return_logprobs": True}, ["did you mean return_logprob=?"]),
    ({"quux": 1}, ["quux=1", "it takes", "sampling_params", "top_logprobs_num"]),
    ({"engine": 0}, ["engine=0"]),
    ({"ids": ["a"]}, ["ids=['a']"]),
    ({"extra_key": "x"}, ["extra_key='x'"]),
    ({"weight_version": 3}, ["weight_version=3"]),
]


@pytest.mark.parametrize(("slip", "words"), SLIPS)
@pytest.mark.parametrize("verb", VERBS)
def test_slips(pool: EnginePool, verb: str, slip: dict[str, Any], words: list[str]) -> None:
    """For an unknown name the error says where it belongs, or names the nearest, in every call
    and its async twin. Values that the pool sets itself are refused."""
    given: Any = MESSAGES if verb == "chat" else "12+7="

    async def asynchronously() -> None:
        answer = getattr(pool, f"async_{verb}")(given, **slip)
        if hasattr(answer, "__aiter__"):
            await anext(answer)
        else:
            await answer

    for call in (
        lambda: getattr(pool, verb)(given, **slip),
        lambda: anyio.run(asynchronously),
    ):
        refused(pool, call, f"{verb}: ", *words, prompt=None)


def test_slips_of_one_call(pool: EnginePool) -> None:
    """A call refuses arguments of other calls."""
    for verb, given, word in (
        ("generate", {"prompts": "12+7="}, "did you mean prompt=?"),
        ("generate_all", {"prompt": "12+7="}, "did you mean prompts=?"),
        ("stream", {"prompt": "12+7=", "stream": True}, "stream=True"),
        ("stream", {"prompt": "12+7=", "raise_on_error": True}, "raise_on_error=True"),
        ("chat", {"messages": MESSAGES, "input_ids": IDS}, "input_ids="),
    ):
        refused(pool, lambda v=verb, g=given: getattr(pool, v)(**g), word, prompt=None)


def test_slip_does_not_open() -> None:
    """The name is refused before the pool opens."""
    pool = EnginePool(devices=1)
    with pytest.raises(InvalidRequest, match="sampling_params="):
        pool.generate("12+7=", temperature=0)  # type: ignore[call-arg]
    assert "not open yet" in repr(pool)


# One rule for what is empty


def test_empty(pool: EnginePool) -> None:
    """An empty list is a list of no prompts, by text and by ids, in every call. An empty prompt
    is an error."""
    for given in ({}, {"prompts": None}, {"input_ids": None}):
        refused(pool, lambda g=given: pool.generate_all(**g), "prompts or input_ids", prompt=None)
    for empty in ([], (), np.array([]), np.zeros((0, 3), np.int32), jnp.zeros((0,), jnp.int32)):
        assert pool.generate_all(empty) == pool.generate_all(input_ids=empty) == []
        assert pool.generate(empty) == pool.generate(input_ids=empty) == []
        assert list(pool.stream(empty)) == list(pool.as_completed(input_ids=empty)) == []
    for given in (
        {"prompts": ""},
        {"prompts": [""]},
        {"input_ids": [[]]},
        {"input_ids": np.zeros((1, 0), np.int32)},
    ):
        refused(pool, lambda g=given: pool.generate_all(**g), "the prompt is empty", prompt=0)
