"""GPT-2 experiments on the geometry of weights; run with `python -m experiments`."""

import os

# On CPU, JAX's SVD and eigh call OpenBLAS, whose threads and XLA's own wait for each other: ten times
# slower here for a batch of eight 512 x 128 matrices than with one thread. Must stand before NumPy loads.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
