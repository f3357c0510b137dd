"""Tensors and files: boundary tensors, gradients, parameters, checkpoints."""
