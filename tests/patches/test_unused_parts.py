"""A thread and a zmq context that upstream's scheduler makes and does not use."""

from types import SimpleNamespace

import pytest
import zmq

import patches
from patches import expert_statistics, unused_sockets
from patches._lookup import module
from tests.support.upstream import Upstream

SECONDS = 60.0


@pytest.fixture
def contexts(monkeypatch):
    """The zmq contexts that are made during the test. They are closed at its end."""
    made = []

    class Context(zmq.Context):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr(zmq, "Context", Context)
    yield made
    for context in made:
        context.term()


def worker(engine):
    return engine.scheduler.tp_worker


def test_upstream_keeps_a_thread_and_a_context(checkpoint, contexts):
    """Without the patches, the thread waits for what nobody reads, and the context is never
    used."""
    engine = Upstream(checkpoint)
    thread = worker(engine).worker.sync_expert_ids_d2h_thread
    thread.join(0.2)
    assert thread.is_alive()
    assert len(contexts) == 1


def test_neither_is_there(checkpoint, contexts):
    """With the patches, the thread has ended, no context was made, and the engine steps as
    usual."""
    patches.apply([expert_statistics.PATCH, unused_sockets.PATCH])
    engine = Upstream(checkpoint)
    thread = worker(engine).worker.sync_expert_ids_d2h_thread
    thread.join(SECONDS)
    assert not thread.is_alive()
    assert contexts == []
    [output_ids] = engine.run([[2, 3]], {"temperature": 0.0, "max_new_tokens": 4})
    assert len(output_ids) == 4


def test_experts_that_are_read_have_their_thread():
    """With one of the options on, upstream's function runs unchanged."""
    patches.apply([expert_statistics.PATCH])
    ran = []
    stand_in = SimpleNamespace(
        server_args=SimpleNamespace(enable_expert_balance_debug=True),
        _sync_experts_ids_d2h=lambda: ran.append(True),
    )
    function = module("sgl_jax.srt.managers.tp_worker").ModelWorker._sync_expert_ids_d2h_thread_func
    function(stand_in)
    assert ran == [True]


def test_sockets_that_are_opened_have_their_context(contexts):
    """With the patch, the first use makes the only context, with the arguments that were given."""
    patches.apply([unused_sockets.PATCH])
    scheduler = module("sgl_jax.srt.managers.scheduler")
    assert scheduler.zmq.PULL is zmq.PULL
    context = scheduler.zmq.Context(2)
    assert contexts == []
    sockets = [context.socket(zmq.PULL), context.socket(zmq.PUSH)]
    assert len(contexts) == 1
    assert contexts[0].get(zmq.IO_THREADS) == 2
    for socket in sockets:
        socket.close()
