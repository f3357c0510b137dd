"""The planner: who holds which layers on a heterogeneous network. Standalone: imports neither jax nor the runtime."""
