"""A Llama-like decoder whose feed-forward parts are experts, in Flax (jaxdt.model.decoder). A block has the norms ln1,
ln2, and with qk_norm q_norm, k_norm; the projections q, k, v, o of the attention; the router [D,E]; and of all experts
together gate and up [E,D,F] and down [E,F,D].

B samples, T tokens, D width, F width inside an expert, E experts, S experts of a token, R = B T S rows."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxdt.model import kernels
from jaxdt.model.base import Auxiliary, Begins
from jaxdt.model.decoder import decoder, onto_residual, with_attention
from jaxdt.model.layers import INIT_STD, RMSNorm
from jaxdt.run.families.moe import MoeConfig


class Block(nn.Module):
    """Pre-norm attention and experts, [B,T,D] -> [B,T,D] in the dtype of its input; beside it the router's auxiliary
    loss and the load of the experts. The router computes in fp32."""

    config: MoeConfig

    @nn.compact
    def __call__(
        self, x_BTD: Float[Array, "B T D"], begins_BT: Begins = None
    ) -> tuple[Float[Array, "B T D"], Auxiliary]:
        c, normal = self.config, nn.initializers.normal(INIT_STD)
        x_BTD = with_attention(c, x_BTD, begins_BT)
        h_BTD = RMSNorm(c.norm_eps, name="ln2")(x_BTD)
        router_DE = self.param("router", normal, (c.d_model, c.n_experts), jnp.float32)
        probs_BTE = jax.nn.softmax(kernels.product(h_BTD.astype(jnp.float32), router_DE), axis=-1)
        weights_BTS, chosen_BTS = jax.lax.top_k(probs_BTE, c.n_experts_per_token)
        if c.norm_topk:
            weights_BTS = weights_BTS / jnp.sum(weights_BTS, axis=-1, keepdims=True)
        counts_BE = jnp.sum(jax.nn.one_hot(chosen_BTS, c.n_experts), axis=(1, 2))
        load_E = jnp.sum(counts_BE, axis=0)

        # The rows of an expert stand below one another: a token has a row for each expert that it is sent to.
        d_model, d_ff = c.d_model, c.d_ff
        order_R = jnp.argsort(chosen_BTS.reshape(-1))
        inverse_R = jnp.argsort(order_R)
        rows_RD = jnp.repeat(h_BTD.reshape(-1, d_model), c.n_experts_per_token, axis=0)
        rows_RD = kernels.permuted(rows_RD, order_R, inverse_R)
        gate_EDF = self.param("gate", normal, (c.n_experts, d_model, d_ff), jnp.float32)
        up_EDF = self.param("up", normal, (c.n_experts, d_model, d_ff), jnp.float32)
        down_EFD = self.param("down", onto_residual(c), (c.n_experts, d_ff, d_model), jnp.float32)
        sizes_E = load_E.astype(jnp.int32)
        up_RF = kernels.swiglu(*(kernels.grouped_product(rows_RD, w_EDF, sizes_E) for w_EDF in (gate_EDF, up_EDF)))
        rows_RD = kernels.permuted(kernels.grouped_product(up_RF, down_EFD, sizes_E), inverse_R, order_R)
        rows_BTSD = rows_RD.reshape(*chosen_BTS.shape, d_model).astype(jnp.float32)
        mixed_BTD = jnp.sum(rows_BTSD * weights_BTS[..., None], axis=2)
        loss = _balance_loss(probs_BTE, counts_BE) * (c.router_aux_coef / c.n_layers)
        return x_BTD + mixed_BTD.astype(x_BTD.dtype), Auxiliary(loss, load_E)


def _balance_loss(probs_BTE: Float[Array, "B T E"], counts_BE: Float[Array, "B E"]) -> Float[Array, ""]:
    """The loss of Switch Transformers (Fedus et al. 2021, Eq. 4) for each sample alone, added up; S for a sample whose
    tokens are spread evenly."""
    n_tokens, n_experts = probs_BTE.shape[1:]
    return jnp.sum(counts_BE / n_tokens * jnp.mean(probs_BTE, axis=1)) * n_experts


MODEL = decoder(Block)
