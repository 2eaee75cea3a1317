"""What every test runs under, set before JAX and NumPy load: eight CPU devices and quick compilation."""

import os
import tempfile
from pathlib import Path

from hypothesis import settings

# The same examples in every run; `pytest --hypothesis-profile=default` draws others.
settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")

# OpenBLAS's threads and XLA's own wait for each other in every SVD on the CPU.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Most of the suite's time is compilation, and LLVM's optimisations of what XLA gives it are a third of that.
# XLA's own passes, whose result the tests of compiled programs read, run as ever.
FLAGS = {"xla_force_host_platform_device_count": 8, "xla_backend_optimization_level": 0}
for flag, value in FLAGS.items():
    if flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --{flag}={value}".strip()

# What one test compiles, the next ones and the processes that they start read from disk. The directory ends
# with the process that makes it: under pytest-xdist the one whose environment the workers inherit.
if "PYTEST_XDIST_WORKER" not in os.environ:
    COMPILED = tempfile.TemporaryDirectory(prefix="compiled-", ignore_cleanup_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = COMPILED.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
else:
    # One for each worker: JAX does not write atomically, so another's file may be half there.
    cache = Path(os.environ["JAX_COMPILATION_CACHE_DIR"], os.environ["PYTEST_XDIST_WORKER"])
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(cache)
