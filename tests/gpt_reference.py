"""The GPT in plain jnp."""

from functools import partial, reduce

import jax
import jax.numpy as jnp
import numpy as np

from jaxdt.run.families.gpt import GPTConfig

SIZES = dict(n_layers=3, d_model=16, n_heads=2, d_ff=24, max_len=6, vocab_size=19)
CONFIGS = {
    "plain": GPTConfig(**SIZES),
    "tied": GPTConfig(**SIZES, tied_head=True, positions="rotary", activation="geglu"),
    "shared": GPTConfig(**SIZES | {"n_layers": 4}, n_shared_blocks=2),
    "bottleneck": GPTConfig(**SIZES, compression="bottleneck2", compression_after=(1, 2)),
    "shared_maxout": GPTConfig(
        **SIZES | {"n_layers": 4}, n_shared_blocks=2, compression="maxout2", compression_after=(1, 2)
    ),
}


@partial(jax.jit, static_argnums=0)
def logits(config, params, tokens_BT):
    x = params["tok"][tokens_BT]
    if config.positions == "learned":
        x = x + params["pos"][None, : tokens_BT.shape[1]]
    for layer in range(config.n_layers):
        x = _block(config, params[f"block_{config.block_of(layer):03d}"], x)
        after = layer + 1
        if after in config.compression_after:
            narrow = _narrow(config.compression, params[f"sender_{after:03d}"], x)
            x = _dense(params[f"receiver_{after:03d}"]["expand"], narrow)
    x = _norm(params["head"]["ln"], x)
    return x @ (params["tok"].T if config.tied_head else params["head"]["out"])


def _block(config, p, x):
    head_width = config.d_model // config.n_heads
    q, k, v = jnp.split(_dense(p["qkv"], _norm(p["ln1"], x)), 3, axis=-1)
    heads = []
    for h in range(config.n_heads):
        mine = slice(h * head_width, (h + 1) * head_width)
        heads.append(_one_head(config, q[..., mine], k[..., mine], v[..., mine]))
    x = x + _dense(p["proj"], jnp.concatenate(heads, axis=-1))
    up = _dense(p["up"], _norm(p["ln2"], x))
    if config.activation == "gelu":
        return x + _dense(p["down"], jax.nn.gelu(up))
    return x + _dense(p["down"], jax.nn.gelu(up[..., : config.d_ff]) * up[..., config.d_ff :])


def _narrow(compression, p, x):
    """SWARM App. J, the sender's half. Where features tie, jnp.maximum halves the gradient: tests keep off ties."""
    x = _norm(p["ln_wide"], x)
    if compression.startswith("bottleneck"):
        return _norm(p["ln_narrow"], _dense(p["compress"], x))
    ratio = int(compression.removeprefix("maxout"))
    return _norm(p["ln_narrow"], reduce(jnp.maximum, [x[..., i::ratio] for i in range(ratio)]))


def _one_head(config, q_BTK, k_BTK, v_BTK):
    n_tokens, width = q_BTK.shape[-2:]
    if config.positions == "rotary":
        q_BTK, k_BTK = _turn(q_BTK), _turn(k_BTK)
    scores = jnp.einsum("bqk,btk->bqt", q_BTK, k_BTK) / width**0.5
    hidden = jnp.arange(n_tokens)[None, :] > jnp.arange(n_tokens)[:, None]
    return jax.nn.softmax(jnp.where(hidden[None], -1e30, scores), axis=-1) @ v_BTK


def _turn(x_BTK):
    """Rotation of the complex numbers x[i] + i x[i + K/2]."""
    n_tokens, width = x_BTK.shape[-2:]
    z = jax.lax.complex(x_BTK[..., : width // 2], x_BTK[..., width // 2 :])
    angle = np.outer(np.arange(n_tokens), 10000.0 ** (-2.0 * np.arange(width // 2) / width))
    z = z * np.exp(1j * angle).astype(np.complex64)[None]
    return jnp.concatenate([z.real, z.imag], axis=-1)


def _dense(p, x):
    return x @ p["kernel"] + p["bias"][None, None]


def _norm(p, x):
    mean = jnp.mean(x, axis=-1, keepdims=True)
    return (x - mean) / jnp.sqrt(jnp.var(x, axis=-1, keepdims=True) + 1e-5) * p["scale"][None, None] + p["bias"][
        None, None
    ]
