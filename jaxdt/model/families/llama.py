"""A Llama-like decoder in Flax (jaxdt.model.decoder). A block has the norms ln1, ln2, and with qk_norm q_norm, k_norm;
the projections q, k, v, o, gate, up, down.

B samples, T tokens, D width, F feed-forward width."""

from functools import partial

import flax.linen as nn
from jaxtyping import Array, Float

from jaxdt.model import kernels
from jaxdt.model.base import Begins
from jaxdt.model.decoder import decoder, onto_residual, with_attention
from jaxdt.model.layers import Dense, RMSNorm
from jaxdt.run.families.llama import LlamaConfig


class Block(nn.Module):
    """Pre-norm attention and feed-forward, [B,T,D] -> [B,T,D] in the dtype of its input."""

    config: LlamaConfig

    @nn.compact
    def __call__(self, x_BTD: Float[Array, "B T D"], begins_BT: Begins = None) -> Float[Array, "B T D"]:
        c = self.config
        dense = partial(Dense, use_bias=False)
        x_BTD = with_attention(c, x_BTD, begins_BT)
        h_BTD = RMSNorm(c.norm_eps, name="ln2")(x_BTD)
        up_BTF = kernels.swiglu(dense(c.d_ff, name="gate")(h_BTD), dense(c.d_ff, name="up")(h_BTD))
        return x_BTD + dense(c.d_model, onto_residual(c), name="down")(up_BTF)


MODEL = decoder(Block)
