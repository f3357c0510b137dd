"""Tensors and files of one process: boundary tensors, gradients, parameters, checkpoints, durable values.

May import jax, jaxdt.model, jaxdt.codec, protocol and spec, and of the runtime only `net`."""
