"""Decides which host runs which output, and takes the hosts' reports. Runs on the fleet's loop."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from enginepool import InvalidRequest, PoolClosed, PoolFailed
from enginepool.ray.call import Output, RayCall
from enginepool.ray.credits import Waiting, assign
from enginepool.ray.link import HostLink, HostLost
from enginepool.ray.wire import News

# How many of the oldest waiting outputs are considered.
_WINDOW = 1024


class OutputRouter:
    """Gives outputs to hosts, and takes their results.

    Args:
        ready: Returns the hosts that may get outputs now.
        tell: Begins a call of a host's method, without waiting. The fleet notices a lost host.
    """

    def __init__(
        self,
        hosts: Sequence[HostLink],
        ready: Callable[[], list[HostLink]],
        tell: Callable[..., None],
    ) -> None:
        self.calls: set[RayCall] = set()
        self._hosts = hosts
        self._ready = ready
        self._tell = tell
        self._keys = itertools.count()
        self._waiting: dict[int, Output] = {}  # by arrival; what resumes keeps its place
        self._arrivals: dict[Output, int] = {}
        self._arrival = itertools.count()

    @property
    def waiting(self) -> int:
        """How many outputs no host has."""
        return len(self._waiting)

    def uses(self, adapter: str) -> bool:
        """Whether an output that has not ended needs this adapter."""
        return any(
            output.options.get("lora_path") == adapter and not output.done
            for call in self.calls
            for output in call.outputs
        )

    def submit(self, call: RayCall) -> None:
        if not call.outputs:
            call.close()
            return
        self.calls.add(call)
        for output in call.outputs:
            self._arrivals[output] = number = next(self._arrival)
            self._waiting[number] = output
        self.pump()

    def leave(self, call: RayCall, err_type: str, message: str) -> None:
        """End a call's unfinished outputs. They keep their tokens."""
        self._cancel(call)
        for output in call.outputs:
            if not output.done:
                output.end(err_type, message)
        self.pump()

    def end_waiting(self, err_type: str, message: str) -> None:
        """End the outputs that no host has. They keep their tokens."""
        waiting, self._waiting = self._waiting, {}
        for output in waiting.values():
            output.end(err_type, message)
            self._ended(output)

    def _cancel(self, call: RayCall) -> None:
        for host in self._hosts:
            keys = [key for key, output in host.running.items() if output.call is call]
            for key in keys:
                del host.running[key]
            if keys and host.state == "serving":
                self._tell(host, "cancel", keys)
        self._forget(call)

    def fail_all(self, error: Exception) -> None:
        """End every call, also if its outputs run on hosts. Each caller raises this error."""
        for call in list(self.calls):
            call.fail(error)
            self._forget(call)

    def pump(self) -> None:
        """Give the waiting outputs to hosts."""
        ready = self._ready()
        if not ready or not self._waiting:
            return
        waiting = self._oldest(len(ready))
        entries = [
            Waiting(output.group, output.call.last_hosts.get(output.group), output.suspect)
            for _, output in waiting
        ]
        given: dict[int, list[Output]] = {}
        for position, index in assign([host.load() for host in ready], entries):
            number, output = waiting[position]
            del self._waiting[number]
            output.call.last_hosts[output.group] = index
            given.setdefault(index, []).append(output)
        for host in ready:
            attempts = []
            for output in given.get(host.index, ()):
                key = next(self._keys)
                host.running[key] = output
                attempts.append(output.attempt(key))
            if attempts:
                # A process that has just come back refuses them. The fleet notices that, too.
                self._tell(host, "submit", attempts, host.number)

    def _oldest(self, hosts: int) -> list[tuple[int, Output]]:
        """The oldest waiting outputs, with at most one suspect for each host: more could not run
        now, and would keep other outputs out of the window."""
        found: list[tuple[int, Output]] = []
        suspects = 0
        for number, output in self._waiting.items():
            if output.suspect:
                suspects += 1
                if suspects > hosts:
                    continue
            found.append((number, output))
            if len(found) == _WINDOW:
                break
        return found

    def heard(self, host: HostLink, news: News) -> None:
        """
        Raises:
            HostLost: The host's pool has failed.
        """
        for key, result in news.finished:
            output = host.running.pop(key, None)
            if output is not None:
                output.call.finish(output, result)
                self._ended(output)
        for key, chunk in news.progress.items():
            output = host.running.get(key)
            if output is not None and not output.done:
                output.gain(chunk)
                output.call.show(output)
        for key, error in news.failed:
            output = host.running.get(key)
            if output is None:
                continue
            if isinstance(error, (PoolFailed, PoolClosed)):
                raise HostLost(f"its pool failed: {error}", end=True)
            del host.running[key]
            if isinstance(error, InvalidRequest):
                output.call.fail(error)
                self._cancel(output.call)
            else:
                output.end("host_error", str(error))
                self._ended(output)

    def move(self, host: HostLink, *, blamed: bool) -> None:
        """Let a lost host's outputs wait again, or end them.

        Args:
            blamed: Whether the host was lost while it ran them, and was not ended by us.
        """
        running, host.running = host.running, {}
        for output in running.values():
            output.call.last_hosts.pop(output.group, None)
            if output.done:
                continue
            if blamed and not output.lost_with(host.index):
                self._ended(output)
            else:
                self._waiting[self._arrivals[output]] = output
        self._waiting = dict(sorted(self._waiting.items()))
        self.pump()

    def _ended(self, output: Output) -> None:
        self._arrivals.pop(output, None)
        if output.call.done.is_set():
            self._forget(output.call)

    def _forget(self, call: RayCall) -> None:
        self.calls.discard(call)
        for output in call.outputs:
            self._waiting.pop(self._arrivals.pop(output, -1), None)
