"""XLA's flags for tests. JAX reads them once, when it starts."""

import mmap
from pathlib import Path

import jaxlib

# On CPU, a program is compiled in four fifths of the time. Newer JAX has these emitters alone and
# ends the process at a flag that it does not know.
_FLAG = "xla_cpu_use_fusion_emitters"
_LIBRARY = Path(jaxlib.__file__).with_name("libjax_common.so")


def _has_flag() -> bool:
    with _LIBRARY.open("rb") as library, mmap.mmap(library.fileno(), 0, prot=mmap.PROT_READ) as its:
        return its.find(b"\0%b\0" % _FLAG.encode()) >= 0  # as a C string


QUICK_TO_COMPILE = f"--{_FLAG}=false" if _has_flag() else ""


def virtual_devices(count: int) -> str:
    return f"--xla_force_host_platform_device_count={count} {QUICK_TO_COMPILE}"
