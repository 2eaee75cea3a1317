"""Eight virtual CPU devices and one OpenBLAS thread for every test, set before JAX and NumPy load."""

import os

# OpenBLAS's threads and XLA's own wait for each other in every SVD on the CPU.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
_DEVICES = "--xla_force_host_platform_device_count=8"
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}".strip()
