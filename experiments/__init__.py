"""GPT-2 experiments on the geometry of weights; run with `python -m experiments`."""
