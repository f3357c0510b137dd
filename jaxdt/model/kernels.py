"""LayerNorm, RMSNorm, GELU, SwiGLU, maxout, causal softmax and the product with a weight, with hand-written backward
passes.

XLA on CPU copies cheap producers into every fusion that reads them; under plain autodiff a deep stage then computes
the same normalisation many times. A custom_vjp avoids that, since it fixes what is saved for the backward pass (about
half of what autodiff saves).
Activations may be fp32 or bf16 and keep their dtype; parameters and their gradients, sums and exponentials are fp32.

B samples, T tokens, D width, F another width, N a narrower one, H heads."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

LAYER_NORM_EPS = 1e-5
GELU_SCALE, GELU_CUBIC = (2.0 / jnp.pi) ** 0.5, 0.044715  # the tanh form, Hendrycks and Gimpel 2016, Sec. 2


@jax.custom_vjp
def product(x_BTD: Float[Array, "B T D"], w_DF: Float32[Array, "D F"]) -> Float[Array, "B T F"]:
    """x w in the dtype of x. Plain autodiff forms the transpose of the gradient of w and turns it over, and it keeps
    three axes where XLA on CPU is faster with two: then a layer takes 6 % more time."""
    return _product_forward(x_BTD, w_DF)[0]


def _product_forward(x_BTD, w_DF):
    return x_BTD @ w_DF.astype(x_BTD.dtype), (x_BTD, w_DF)


def _product_backward(saved, g_BTF):
    x_BTD, w_DF = saved
    x, g = x_BTD.reshape(-1, x_BTD.shape[-1]), g_BTF.reshape(-1, g_BTF.shape[-1])
    gx_BTD = (g @ w_DF.T.astype(g.dtype)).reshape(x_BTD.shape)
    return gx_BTD, jnp.matmul(x.T, g, preferred_element_type=jnp.float32)


product.defvjp(_product_forward, _product_backward)


@jax.custom_vjp
def layer_norm(
    x_BTD: Float[Array, "B T D"], scale_D: Float32[Array, " D"], bias_D: Float32[Array, " D"]
) -> Float[Array, "B T D"]:
    """(x - mean) / sqrt(variance + eps) * scale + bias over the last axis, in the dtype of x."""
    return _layer_norm_forward(x_BTD, scale_D, bias_D)[0]


def _layer_norm_forward(x_BTD, scale_D, bias_D):
    x = x_BTD.astype(jnp.float32)
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    rstd = jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + LAYER_NORM_EPS)
    xhat = centred * rstd
    y = xhat * _last(scale_D, 3) + _last(bias_D, 3)
    return y.astype(x_BTD.dtype), (xhat.astype(x_BTD.dtype), rstd, scale_D)


def _layer_norm_backward(saved, g_BTD):
    xhat_BTD, rstd, scale_D = saved
    g, xhat = g_BTD.astype(jnp.float32), xhat_BTD.astype(jnp.float32)
    gxhat = g * _last(scale_D, 3)
    along = jnp.mean(gxhat * xhat, axis=-1, keepdims=True)
    gx = rstd * (gxhat - jnp.mean(gxhat, axis=-1, keepdims=True) - xhat * along)
    return gx.astype(g_BTD.dtype), jnp.sum(g * xhat, axis=(0, 1)), jnp.sum(g, axis=(0, 1))


layer_norm.defvjp(_layer_norm_forward, _layer_norm_backward)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def rms_norm(x: Float[Array, "*rows D"], scale_D: Float32[Array, " D"], eps: float) -> Float[Array, "*rows D"]:
    """x / sqrt(mean of x^2 + eps) * scale over the last axis, in the dtype of x."""
    return _rms_norm_forward(x, scale_D, eps)[0]


def _rms_norm_forward(x, scale_D, eps: float):
    wide = x.astype(jnp.float32)
    rms = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    xhat = wide * rms
    return (xhat * _last(scale_D, x.ndim)).astype(x.dtype), (xhat.astype(x.dtype), rms, scale_D)


def _rms_norm_backward(eps: float, saved, g_in):
    del eps
    xhat, rms, scale_D = saved
    g, xhat = g_in.astype(jnp.float32), xhat.astype(jnp.float32)
    gxhat = g * _last(scale_D, g.ndim)
    gx = rms * (gxhat - xhat * jnp.mean(gxhat * xhat, axis=-1, keepdims=True))
    return gx.astype(g_in.dtype), jnp.sum(g * xhat, axis=tuple(range(g.ndim - 1)))


rms_norm.defvjp(_rms_norm_forward, _rms_norm_backward)


def _last(v_D, n_axes: int):
    return jnp.reshape(v_D, (1,) * (n_axes - 1) + (-1,))


@jax.custom_vjp
def gelu(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))."""
    return _gelu_forward(x)[0]


def _gelu_tanh(x):
    return jnp.tanh(GELU_SCALE * (x + GELU_CUBIC * x * x * x))


def _gelu_forward(x):
    wide = x.astype(jnp.float32)
    return (0.5 * wide * (1.0 + _gelu_tanh(wide))).astype(x.dtype), x


def _gelu_backward(x, g):
    wide = x.astype(jnp.float32)
    t = _gelu_tanh(wide)
    slope = GELU_SCALE * (1.0 + 3.0 * GELU_CUBIC * wide * wide)
    gx = (0.5 * (1.0 + t) + 0.5 * wide * (1.0 - t * t) * slope) * g.astype(jnp.float32)
    return (gx.astype(x.dtype),)


gelu.defvjp(_gelu_forward, _gelu_backward)


@jax.custom_vjp
def swiglu(gate: Float[Array, "*shape"], value: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """gate / (1 + exp(-gate)) * value (Shazeer 2020, Eq. 6)."""
    return _swiglu_forward(gate, value)[0]


def _swiglu_forward(gate, value):
    wide = gate.astype(jnp.float32)
    return (wide * jax.nn.sigmoid(wide) * value.astype(jnp.float32)).astype(gate.dtype), (gate, value)


def _swiglu_backward(saved, g_in):
    dtypes = [part.dtype for part in saved]
    gate, value, g = (part.astype(jnp.float32) for part in (*saved, g_in))
    s = jax.nn.sigmoid(gate)
    return (s * (1.0 + gate * (1.0 - s)) * value * g).astype(dtypes[0]), (gate * s * g).astype(dtypes[1])


swiglu.defvjp(_swiglu_forward, _swiglu_backward)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def maxout(x_BTD: Float[Array, "B T D"], ratio: int) -> Float[Array, "B T N"]:
    """The largest of each `ratio` adjacent features; N = D / ratio. The gradient goes to the first of equal features,
    while jnp.max would divide it among them."""
    return _maxout_forward(x_BTD, ratio)[0]


def _maxout_forward(x_BTD, ratio: int):
    x_BTNR = x_BTD.reshape(*x_BTD.shape[:-1], -1, ratio)
    return jnp.max(x_BTNR, axis=-1), jnp.argmax(x_BTNR, axis=-1, keepdims=True)


def _maxout_backward(ratio: int, winner_BTN1, g_BTN):
    won_BTNR = winner_BTN1 == jnp.reshape(jnp.arange(ratio), (1, 1, 1, -1))
    gx_BTNR = jnp.where(won_BTNR, g_BTN[..., None], jnp.zeros((), g_BTN.dtype))
    return (gx_BTNR.reshape(*g_BTN.shape[:-1], -1),)


maxout.defvjp(_maxout_forward, _maxout_backward)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def causal_softmax(scores_BHTT: Float[Array, "B H T T"], window: int = 0) -> Float[Array, "B H T T"]:
    """Softmax over the last axis, where query t sees the keys 0..t only; with a window the last `window` of them."""
    return _causal_softmax_forward(scores_BHTT, window)[0]


def _causal_softmax_forward(scores_BHTT, window: int):
    s = scores_BHTT.astype(jnp.float32)
    visible = jnp.tril(jnp.ones(s.shape[-2:], bool))
    if 0 < window < s.shape[-1]:
        visible = jnp.triu(visible, 1 - window)
    s = jnp.where(jnp.reshape(visible, (1, 1, *s.shape[-2:])), s, -jnp.inf)
    e = jnp.exp(s - jnp.max(s, axis=-1, keepdims=True))
    y = (e / jnp.sum(e, axis=-1, keepdims=True)).astype(scores_BHTT.dtype)
    return y, y


def _causal_softmax_backward(window: int, y_BHTT, g_BHTT):
    # Where a key is hidden, y and its gradient are 0, so the mask is not needed again.
    del window
    y, g = y_BHTT.astype(jnp.float32), g_BHTT.astype(jnp.float32)
    return ((y * (g - jnp.sum(g * y, axis=-1, keepdims=True))).astype(g_BHTT.dtype),)


causal_softmax.defvjp(_causal_softmax_forward, _causal_softmax_backward)
