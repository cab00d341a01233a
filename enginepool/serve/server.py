"""Sockets and signals of a server, and its drain: it takes no new requests, lets running ones
finish, and returns."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import uvicorn
import uvloop

from enginepool.devices import resolve_devices
from enginepool.errors import InvalidConfig
from enginepool.logs import logger
from enginepool.serve.connections import Descriptors, protocol_with_header_timeout
from enginepool.serve.options import ServeOptions
from enginepool.serve.request_id import RequestId

if TYPE_CHECKING:
    from enginepool.pool.pool import EnginePool
    from enginepool.serve.service import Service

# Seconds for requests to return their tokens after the drain has ended them.
_GRACE_SECONDS = 10.0
# Seconds after the drain for clients that read slowly or have not sent their request.
_CLOSE_SECONDS = 0.3


class Server:
    """One server over a pool. Ports are taken by the constructor, before engines are built.

    Args:
        pool: Opened by `run` if it is not open; never closed here.

    Attributes:
        port: Of the whole pool.
        engine_ports: Of each engine, if it has one.

    Raises:
        InvalidConfig: An address cannot be bound, or there is not one port for each engine.
    """

    def __init__(self, pool: EnginePool, options: ServeOptions) -> None:
        self.pool = pool
        self._options = options
        self._sockets: list[socket.socket] = []
        if options.engine_ports:
            _check_count(options.engine_ports, pool)
        if options.lora_resolver_dir is not None:
            _check_bounded(pool)
        try:
            for port in (options.port, *options.engine_ports):
                self._sockets.append(_bind(options.host, port))
        except BaseException:
            self.close()
            raise
        self.port, *self.engine_ports = (one.getsockname()[1] for one in self._sockets)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._asked: asyncio.Event | None = None
        self._hurry: asyncio.Event | None = None

    def close(self) -> None:
        """Free the ports of a server that does not run."""
        for one in self._sockets:
            one.close()

    def run(self, on_ready: Callable[[], None] | None = None) -> None:
        """Serve until `stop`, or in the main thread until SIGTERM, SIGINT or SIGHUP; then drain."""
        try:
            self.pool.open()
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._serve(on_ready))
        finally:
            self.close()

    def stop(self) -> None:
        """Ask a running server to drain. A second call ends the drain. Any thread may call it."""
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended meanwhile
                loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        assert self._asked is not None
        assert self._hurry is not None
        (self._hurry if self._asked.is_set() else self._asked).set()

    async def _serve(self, on_ready: Callable[[], None] | None) -> None:
        from enginepool.serve.app import make_app
        from enginepool.serve.service import Service

        self._asked, self._hurry = asyncio.Event(), asyncio.Event()
        self._loop = asyncio.get_running_loop()
        descriptors = Descriptors()
        ports = {port: index for index, port in enumerate(self.engine_ports)}
        service = Service(self.pool, self._options, ports)
        listener = _Uvicorn(
            uvicorn.Config(
                RequestId(make_app(service)),
                log_config=None,
                access_log=False,
                lifespan="off",
                proxy_headers=False,
                server_header=False,
                http=protocol_with_header_timeout(self._options.header_timeout, descriptors.look),
                timeout_keep_alive=self._options.keep_alive_timeout,
                # uvicorn declares an int. asyncio waits for it, and takes a float.
                timeout_graceful_shutdown=_CLOSE_SECONDS,  # pyright: ignore[reportArgumentType]
            )
        )
        with self._signals(), _in_background(service.history.keep(), descriptors.keep()):
            serving = asyncio.create_task(listener.serve(sockets=self._sockets))
            await _first(serving, listener.listening.wait())
            logger().info(
                "enginepool.serving",
                url=_url(self._options.host, self.port),
                host=self._options.host,
                port=self.port,
                engine_ports=self.engine_ports,
                admin=self._options.enable_admin,
            )
            if on_ready is not None and not serving.done():
                on_ready()
            await _first(serving, self._asked.wait())
            await self._drain(service)
            listener.should_exit = True
            await serving

    async def _drain(self, service: Service) -> None:
        assert self._hurry is not None
        service.exchanges.draining = True
        logger().info("enginepool.draining", requests=len(service.exchanges))
        idle = asyncio.create_task(_idle(service))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(_first(idle, self._hurry.wait()), self._options.drain_timeout)
        if service.exchanges:
            logger().warning("enginepool.drain_timeout", requests=len(service.exchanges))
            service.cut()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(idle, _GRACE_SECONDS)
        logger().info("enginepool.drained", requests=len(service.exchanges))

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        # A closed terminal sends SIGHUP, which stops the server too, except under `nohup`.
        hangup = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
        numbers = [signal.SIGTERM, signal.SIGINT, *([signal.SIGHUP] if hangup else [])]
        for number in numbers:
            loop.add_signal_handler(number, self._stop)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers: they close the ports at once and raise signals again."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _idle(service: Service) -> None:
    while service.exchanges or service.admin.busy or service.models.busy:
        await asyncio.sleep(0.02)


async def _first(*things: Any) -> None:
    """Wait for the first of these; raise what it raised."""
    tasks = [asyncio.ensure_future(thing) for thing in things]
    kept = [thing for thing in things if isinstance(thing, asyncio.Task)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            if task not in kept:
                task.cancel()
    for task in done:
        task.result()


@contextlib.contextmanager
def _in_background(*endless: Coroutine[Any, Any, None]) -> Iterator[None]:
    tasks = [asyncio.create_task(one) for one in endless]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()


def _url(host: str, port: int) -> str:
    """The URL of the server on this machine."""
    if host in ("0.0.0.0", "::"):
        host = "localhost"
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _check_count(ports: Sequence[int], pool: EnginePool) -> None:
    """Called before engines are built, because that takes minutes."""
    engines = len(resolve_devices(pool.config.devices, pool.config.tp_size))
    if len(ports) != engines:
        raise InvalidConfig(f"{len(ports)} ports for {engines} engines: give each one port")


def _check_bounded(pool: EnginePool) -> None:
    if not pool.config.server_args.get("max_loaded_loras"):
        raise InvalidConfig(
            "--lora-resolver-dir needs --enable-lora, and --max-loaded-loras: the most adapters on "
            "the host"
        )


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        one = socket.socket(family, kind, proto)
        try:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(address)
        except BaseException:
            one.close()
            raise
    except OSError as error:
        raise InvalidConfig(f"cannot listen on {host} port {port}: {error}") from None
    return one
