"""Settings that must be in place before anything imports jax; read from the environment, so that tests of modules
without jax do not import it: eight virtual CPU devices, no silent change of a dtype or of a rank."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
