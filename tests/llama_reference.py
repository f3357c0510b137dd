"""The Llama-like decoder in plain jnp: one head and one pair of tokens' positions at a time, complex numbers for rotary
positions."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from gpt_reference import SIZES

from jaxdt.run.families.llama import LlamaConfig

LLAMA = SIZES | dict(n_heads=4, n_kv_heads=2)
CONFIGS = {
    "llama3": LlamaConfig(**LLAMA, rope_theta=500.0, rope_scaling=(4.0, 0.5, 2.0, 4.0)),
    "qwen3": LlamaConfig(**LLAMA | {"n_kv_heads": 1}, d_head=6, qk_norm=True, tied_head=True),
    "biased": LlamaConfig(**LLAMA, window=3, qkv_bias=True, o_bias=True, norm_eps=1e-3, tied_head=True),
}


@partial(jax.jit, static_argnums=0)
def logits(config, params, tokens_BT):
    x = params["tok"][tokens_BT]
    for layer in range(config.n_layers):
        x = _block(config, params[f"block_{layer:03d}"], x)
    return head(config, params, x)


def head(config, params, x):
    x = norm(config, params["head"]["ln"], x)
    return x @ (params["tok"].T if config.tied_head else params["head"]["out"])


def _block(c, p, x):
    x = with_attention(c, p, x)
    h = norm(c, p["ln2"], x)
    return x + _dense(p["down"], jax.nn.silu(_dense(p["gate"], h)) * _dense(p["up"], h))


def with_attention(c, p, x):
    h, width, heads = norm(c, p["ln1"], x), c.d_head or c.d_model // c.n_heads, []
    part = lambda name, head: _dense(p[name], h)[..., head * width : (head + 1) * width]  # noqa: E731
    for head in range(c.n_heads):
        shared = head // (c.n_heads // c.n_kv_heads)
        q, k, v = part("q", head), part("k", shared), part("v", shared)
        if c.qk_norm:
            q, k = norm(c, p["q_norm"], q), norm(c, p["k_norm"], k)
        heads.append(_attention(c, _turn(c, q), _turn(c, k), v))
    return x + _dense(p["o"], jnp.concatenate(heads, axis=-1))


def _attention(c, q_BTK, k_BTK, v_BTK):
    ahead = np.arange(q_BTK.shape[1])[:, None] - np.arange(q_BTK.shape[1])[None, :]  # of a key, by the query
    is_seen = (ahead >= 0) & (ahead < (c.window or c.max_len))
    scores = jnp.einsum("bqk,btk->bqt", q_BTK, k_BTK) / q_BTK.shape[-1] ** 0.5
    return jax.nn.softmax(jnp.where(is_seen[None], scores, -1e30), axis=-1) @ v_BTK


def _turn(c, x_BTK):
    """The angle of pair i at token t is t / wavelength_i * 2 pi; Llama 3's rule gives a longer wavelength."""
    n_tokens, width = x_BTK.shape[-2:]
    wavelengths = [_wavelength(c, 2 * np.pi * c.rope_theta ** (2 * i / width)) for i in range(width // 2)]
    angle = 2 * np.pi * np.outer(np.arange(n_tokens), 1 / np.array(wavelengths))
    z = jax.lax.complex(x_BTK[..., : width // 2], x_BTK[..., width // 2 :])
    z = z * np.exp(1j * angle).astype(np.complex64)[None]
    return jnp.concatenate([z.real, z.imag], axis=-1)


def _wavelength(c, wavelength):
    if not c.rope_scaling:
        return wavelength
    factor, low, high, original_len = c.rope_scaling
    n_turns = original_len / wavelength
    if n_turns <= low:
        return wavelength * factor
    if n_turns >= high:
        return wavelength
    share = (n_turns - low) / (high - low)
    return 1 / ((1 - share) / (wavelength * factor) + share / wavelength)


def _dense(p, x):
    y = x @ p["kernel"]
    return y + p["bias"][None, None] if "bias" in p else y


def norm(c, p, x):
    return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + c.norm_eps) * p["scale"][None, None]


def block_params(c):
    """By hand: two norms, four projections of the attention, three of the feed-forward part."""
    return attention_params(c) + 3 * c.d_model * c.d_ff


def used_params(c):
    return block_params(c)


def attention_params(c):
    d, width = c.d_model, c.d_head or c.d_model // c.n_heads
    of_queries, of_keys = c.n_heads * width, c.n_kv_heads * width
    biases = c.qkv_bias * (of_queries + 2 * of_keys) + c.o_bias * d
    norms = 2 * d + c.qk_norm * 2 * width
    return norms + biases + d * of_queries + 2 * d * of_keys + of_queries * d


def layer_flops(c, n_tokens):
    """Of the forward of one token by hand: two for each weight; each head of queries meets all tokens twice."""
    return attention_flops(c, n_tokens) + 6 * c.d_model * c.d_ff


def attention_flops(c, n_tokens):
    width = c.d_head or c.d_model // c.n_heads
    return 4 * c.d_model * width * (c.n_heads + c.n_kv_heads) + 4 * c.n_heads * width * n_tokens


def saved(c):
    """Results of a layer's products with weights, by hand."""
    return attention_saved(c) + c.d_model + 2 * c.d_ff


def attention_saved(c):
    width = c.d_head or c.d_model // c.n_heads
    return (c.n_heads + 2 * c.n_kv_heads) * width + c.d_model
