"""A model of one's own in nnx, with a tied head (configs/own_model.py)."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxdt.model.own_model import Parts


class Embed(nnx.Module):
    def __init__(self, vocab_size, width, rngs):
        self.table = nnx.Param(0.02 * jax.random.normal(rngs.params(), (vocab_size, width)))

    def __call__(self, tokens):
        return self.table[...][tokens]


class Block(nnx.Module):
    def __init__(self, width, heads, rngs):
        self.norms = nnx.List([nnx.RMSNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)])
        self.qkv = nnx.Linear(width, 3 * width, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(width, width, rngs=rngs)
        self.up, self.down = nnx.Linear(width, 4 * width, rngs=rngs), nnx.Linear(4 * width, width, rngs=rngs)
        self.heads = heads

    def __call__(self, x):
        b, t, d = x.shape
        q, k, v = (part.reshape(b, t, self.heads, -1) for part in jnp.split(self.qkv(self.norms[0](x)), 3, axis=-1))
        x = x + self.out(jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(b, t, d))
        return x + self.down(jax.nn.gelu(self.up(self.norms[1](x))))


class Head(nnx.Module):
    def __init__(self, width, rngs):
        self.norm = nnx.LayerNorm(width, rngs=rngs)

    def __call__(self, x, table):
        return self.norm(x) @ table.T


def build(options):
    width, heads, vocab_size = options.get("width", 64), options.get("heads", 4), options["vocab_size"]
    frozen = options.get("frozen", [])  # parts of names of leaves, such as "embed/" and "/qkv/"
    return Parts(
        embed=lambda rngs: Embed(vocab_size, width, rngs),
        blocks=[lambda rngs: Block(width, heads, rngs)] * options.get("layers", 4),
        head=lambda rngs: Head(width, rngs),
        vocab_size=vocab_size,
        tied="table",
        trained=lambda name: not any(part in name for part in frozen),
    )
