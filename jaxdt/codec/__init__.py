"""Codecs: how boundary tensors are encoded between stages.

Files here are pure JAX. They import jax, numpy and jaxdt.run, which has names and sizes of codecs in jaxdt.run.codec.
jaxdt.codec.base has the table and the jitted functions that others call; every other file is one codec, and blocks.py
holds what the codecs of one byte per number share.
"""
