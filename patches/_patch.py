"""What a patch is (targets in upstream and a probe), and the registry of applied patches.

For each target the registry has the object that upstream had there, and the wrapper that is there
now. Nothing here imports sgl_jax or jax before it is asked to.
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from patches import _imports

logger = logging.getLogger("patches")
logger.addHandler(logging.NullHandler())  # a library prints nothing


class PatchError(Exception):
    """Raised when a target is missing, has changed in upstream, or was patched by someone else."""


class JaxChanged(PatchError):
    """Raised when a private part of JAX is missing or has changed.

    JAX may change it at any time. The patch is left out, and the log says so once.
    """


@dataclass(frozen=True)
class Target:
    """One binding in upstream that a patch replaces.

    Args:
        module: Module that holds the binding.
        attribute: Its name there, `Class.method` for a method.
        replace: Takes the original and returns its replacement. For a class method it takes and
            returns the plain function.
        parameters: The parameter names that the original must have. None if it is not a function,
            or if versions of upstream differ in them.
        optional: If upstream does not have this binding, the patch is not needed.
        inherited: The class has it from a base, which stays as it is.
    """

    module: str
    attribute: str
    replace: Callable[[Any], Any]
    parameters: tuple[str, ...] | None = None
    optional: bool = False
    inherited: bool = False

    @property
    def path(self) -> str:
        return f"{self.module}.{self.attribute}"

    def holder(self) -> Any:
        """Import the module, quietly, and return the object that holds the binding."""
        holder: Any = _imports.import_quietly(self.module)
        for name in self.attribute.split(".")[:-1]:
            holder = vars(holder).get(name)
            if holder is None:
                raise PatchError(f"{self.path}: upstream has no {name}")
        return holder

    @property
    def name(self) -> str:
        return self.attribute.rpartition(".")[2]

    def current(self) -> Any:
        """Return what is bound now, as it is stored. None if an optional target is missing.

        Raises:
            PatchError: The binding is missing or has changed in upstream.
            JaxChanged: The same, for a binding of JAX.
        """
        try:
            return self._current()
        except (ImportError, PatchError) as exc:
            if self.module.startswith("jax."):
                raise JaxChanged(str(exc)) from exc
            raise

    def _current(self) -> Any:
        # getattr would bind a descriptor.
        found = vars(self.holder()).get(self.name)
        if found is None and self.inherited:
            found = getattr(self.holder(), self.name, None)
        if found is None and not self.optional:
            raise PatchError(f"{self.path}: upstream has no {self.name}")
        if found is not None and self.parameters is not None:
            self._check_parameters(found)
        return found

    def _check_parameters(self, found: Any) -> None:
        function = found.__func__ if isinstance(found, classmethod) else found
        if not callable(function):
            raise PatchError(f"{self.path}: expected a function, found {found!r}")
        parameters = tuple(inspect.signature(function).parameters)
        if parameters != self.parameters:
            expected = ", ".join(self.parameters or ())
            raise PatchError(
                f"{self.path}: expected parameters ({expected}), found ({', '.join(parameters)})"
            )

    def wrapper(self, original: Any) -> Any:
        if isinstance(original, classmethod):
            return classmethod(functools.wraps(original.__func__)(self.replace(original.__func__)))
        wrapper = self.replace(original)
        return functools.wraps(original)(wrapper) if callable(original) else wrapper


@dataclass(frozen=True, eq=False)
class Patch:
    """A defect of upstream, and its repair.

    Args:
        name: The module's name.
        issue: Upstream issue or pull request, or "not reported".
        probe: Takes the originals of `replaced`, in order. Tells whether they have the defect.
            Must not start a JAX backend.
        prepare: Called once when the patch is applied. A revert does not undo it.
        concerns: For a patch that replaces nothing: its targets in the table.
        optimisation: Without it nothing is wrong, only slow.
    """

    name: str
    issue: str
    replaced: tuple[Target, ...]
    probe: Callable[..., bool]
    prepare: Callable[[], None] | None = None
    concerns: tuple[str, ...] = ()
    optimisation: bool = False

    def __repr__(self) -> str:
        return f"<Patch {self.name}>"

    @property
    def targets(self) -> tuple[str, ...]:
        """The dotted path of every binding that the patch replaces."""
        return tuple(target.path for target in self.replaced) or self.concerns

    def is_needed(self) -> bool:
        """Tell whether the installed upstream has the defect, applied or not.

        An optimisation that does not fit is left out, and the log says so once.

        Raises:
            PatchError: A target is missing or has changed in upstream.
        """
        try:
            return self._is_needed()
        except PatchError as exc:
            if not (self.optimisation or isinstance(exc, JaxChanged)):
                raise
            _say_left_out(self, exc)
            return False

    def _is_needed(self) -> bool:
        try:
            with _lock:
                originals = [_original(target) for target in self.replaced]
            if any(original is None for original in originals):
                return False
            return bool(self.probe(*originals))
        except (AttributeError, LookupError, NameError, OSError, TypeError, ValueError) as exc:
            # The probe runs upstream's code with stand-ins. If it fails, the code has changed.
            raise PatchError(
                f"{self.name}: cannot tell whether {', '.join(self.targets)} needs it"
            ) from exc

    def _install(self) -> list[_Binding]:
        bindings = []
        for target in self.replaced:
            original = target.current()
            bindings.append(_Binding(target, target.holder(), original, target.wrapper(original)))
        if self.prepare is not None:
            self.prepare()
        for binding in bindings:
            setattr(binding.holder, binding.target.name, binding.wrapper)
        return bindings


@dataclass(frozen=True, eq=False)
class _Binding:
    target: Target
    holder: Any
    original: Any
    wrapper: Any

    def check_untouched(self) -> None:
        found = vars(self.holder).get(self.target.name)
        if found is not self.wrapper:
            raise PatchError(
                f"{self.target.path}: was patched again by someone else (found {found!r}); "
                "revert that first"
            )

    def restore(self) -> None:
        if self.target.inherited:
            delattr(self.holder, self.target.name)
        else:
            setattr(self.holder, self.target.name, self.original)


# Held while patches are applied or reverted: several pools may open and close at once. Reentrant,
# because `apply` probes while it holds the lock.
_lock = threading.RLock()
_applied: dict[Patch, list[_Binding]] = {}
_left_out: set[Patch] = set()


def _say_left_out(patch: Patch, why: PatchError) -> None:
    if patch not in _left_out:
        _left_out.add(patch)
        logger.warning("%s is left out: %s", patch.name, why)


def _original(target: Target) -> Any:
    for bindings in _applied.values():
        for binding in bindings:
            if binding.target.path == target.path:
                return binding.original
    return target.current()


def apply(patches: Sequence[Patch]) -> list[Patch]:
    """Apply those of the patches that are needed and not yet applied, all or none."""
    done: list[Patch] = []
    with _lock:
        try:
            for patch in patches:
                if patch not in _applied and patch.is_needed():
                    _applied[patch] = patch._install()
                    done.append(patch)
        except BaseException:
            revert(done)
            raise
    return done


def revert(patches: Sequence[Patch]) -> None:
    """Restore the originals of those patches that are applied, the last one first.

    Raises:
        PatchError: Someone replaced a target again. That patch and those applied before it stay.
    """
    with _lock:
        for patch in reversed([patch for patch in _applied if patch in set(patches)]):
            bindings = _applied[patch]
            for binding in bindings:
                binding.check_untouched()
            for binding in reversed(bindings):
                binding.restore()
            del _applied[patch]


def is_applied(patch: Patch) -> bool:
    """Tell whether the patch is applied at present."""
    with _lock:
        return patch in _applied
