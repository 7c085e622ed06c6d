"""Kernels: one file each, a plain jnp form beside every Pallas form, chosen in `select.py`."""
