"""A model of one's own in linen: a recurrent one, whose blocks are gated running means (configs/own_model.py)."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxdt.model.own_model import Parts


class Block(nn.Module):
    """Each feature is a running mean over the tokens so far, with a rate and a gate of its own, then a dense layer."""

    @nn.compact
    def __call__(self, x):
        width = x.shape[-1]
        h = nn.RMSNorm()(x)
        keep = nn.sigmoid(nn.Dense(width, bias_init=nn.initializers.constant(2.0), name="keep")(h))
        value = (1 - keep) * nn.Dense(width, name="value")(h)

        def combine(left, right):
            return left[0] * right[0], left[1] * right[0] + right[1]

        _, mean = jax.lax.associative_scan(combine, (keep, value), axis=1)
        x = x + nn.Dense(width, name="out")(mean * nn.silu(nn.Dense(width, name="gate")(h)))
        return x + nn.Dense(width, name="down")(nn.gelu(nn.Dense(2 * width, name="up")(nn.RMSNorm()(x))))


class Head(nn.Module):
    vocab_size: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.vocab_size, use_bias=False, name="out")(nn.RMSNorm()(x)).astype(jnp.float32)


def build(options):
    width, vocab_size = options.get("width", 64), options["vocab_size"]
    embed = nn.Embed(vocab_size, width, embedding_init=nn.initializers.normal(0.02))
    return Parts(embed=embed, blocks=[Block()] * options.get("layers", 4), head=Head(vocab_size), vocab_size=vocab_size)
