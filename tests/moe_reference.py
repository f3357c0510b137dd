"""The Llama-like decoder with experts in plain jnp: every expert computes every token, and those that the router did
not choose count 0 times."""

from functools import partial

import jax
import jax.numpy as jnp
import llama_reference as llama

from jaxdt.run.families.moe import MoeConfig

MOE = llama.LLAMA | dict(d_ff=12, n_experts=5, router_aux_coef=0.5)
CONFIGS = {
    "mixtral": MoeConfig(**MOE),
    "qwen3_moe": MoeConfig(**MOE, d_head=6, qk_norm=True, norm_topk=False, tied_head=True),
    "one_expert": MoeConfig(**MOE | dict(n_experts_per_token=1), window=3),
}


def logits(config, params, tokens_BT):
    return logits_and_auxiliary(config, params, tokens_BT)[0]


@partial(jax.jit, static_argnums=0)
def logits_and_auxiliary(config, params, tokens_BT):
    x, total = params["tok"][tokens_BT], 0.0
    for layer in range(config.n_layers):
        p = params[f"block_{layer:03d}"]
        x = llama.with_attention(config, p, x)
        mixed, loss_B = _experts(config, p, llama.norm(config, p["ln2"], x))
        x, total = x + mixed, total + jnp.sum(loss_B)
    return llama.head(config, params, x), config.router_aux_coef * total / config.n_layers


def _experts(c, p, h):
    probs = jax.nn.softmax(h @ p["router"], axis=-1)
    least = jnp.sort(probs, axis=-1)[..., -c.n_experts_per_token, None]
    is_chosen = probs >= least
    weights = jnp.where(is_chosen, probs, 0.0)
    if c.norm_topk:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    mixed = 0.0
    for e in range(c.n_experts):
        up = jax.nn.silu(h @ p["gate"][e]) * (h @ p["up"][e])
        mixed = mixed + weights[..., e, None] * (up @ p["down"][e])
    tokens_frac, prob = jnp.mean(is_chosen, axis=1, dtype=jnp.float32), jnp.mean(probs, axis=1)
    return mixed, c.n_experts * jnp.sum(tokens_frac * prob, axis=-1)


def least_margin(config, params, tokens_BT):
    """By how much, at least, the probability of the last expert that a token chose exceeds that of the next one, by the
    larger of both. Where it is near 0, rounding decides, and two right programs may differ."""
    margins, x = [], params["tok"][tokens_BT]
    for layer in range(config.n_layers):
        p = params[f"block_{layer:03d}"]
        x = llama.with_attention(config, p, x)
        h = llama.norm(config, p["ln2"], x)
        ranked = jnp.sort(jax.nn.softmax(h @ p["router"], axis=-1), axis=-1)[..., ::-1]
        last, following = ranked[..., config.n_experts_per_token - 1], ranked[..., config.n_experts_per_token]
        margins.append(jnp.min((last - following) / last))
        x = x + _experts(config, p, h)[0]
    return jnp.min(jnp.stack(margins))


def block_params(c):
    """By hand: attention and two norms, the router, three matrices of each expert."""
    return llama.attention_params(c) + c.d_model * c.n_experts + 3 * c.d_model * c.d_ff * c.n_experts


def used_params(c):
    return block_params(c) - 3 * c.d_model * c.d_ff * (c.n_experts - c.n_experts_per_token)


def layer_flops(c, n_tokens):
    matrices = c.d_model * c.n_experts + 3 * c.d_model * c.d_ff * c.n_experts_per_token
    return llama.attention_flops(c, n_tokens) + 2 * matrices


def saved(c):
    return llama.attention_saved(c) + c.n_experts + c.n_experts_per_token * (2 * c.d_ff + c.d_model)
