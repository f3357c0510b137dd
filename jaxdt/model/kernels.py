"""LayerNorm, RMSNorm, GELU, SwiGLU, maxout, causal softmax, the product with a weight, with a frozen one, and that of
groups of rows, with hand-written backward passes.

XLA on CPU copies cheap producers into every fusion that reads them; under plain autodiff a deep stage then computes
the same normalisation many times. A custom_vjp avoids that, since it fixes what is saved for the backward pass (about
half of what autodiff saves).
Activations may be fp32 or bf16 and keep their dtype; parameters and their gradients, sums and exponentials are fp32.

B samples, T tokens, D width, F another width, N a narrower one, H heads, R rows, E experts, K the rank of an adapter.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jaxtyping import Array, Float, Float32, Int

LAYER_NORM_EPS = 1e-5
BLOCK_ROWS_MIN, BLOCK_ROWS_MAX = 32, 512  # of a block of grouped rows
LARGE_NUMBERS, BLOCK_NUMBERS = 1 << 22, 1 << 17  # of a narrow matrix that is converted in blocks, and of a block
GELU_SCALE, GELU_CUBIC = (2.0 / jnp.pi) ** 0.5, 0.044715  # the tanh form, Hendrycks and Gimpel 2016, Sec. 2


def is_narrow(array: Any) -> bool:
    """Whether its numbers are those of bf16, or on a CPU their bits: XLA converts an array of bf16 there before it cuts
    a part out of it, and an array of integers not."""
    return array.dtype in (jnp.bfloat16, jnp.uint16)


def narrowed(array: Any) -> Any:
    """An array of fp32, of jax or of numpy, as a narrow one of the same kind for the platform of this process."""
    rounded = array.astype(jnp.bfloat16)
    return rounded.view(jnp.uint16) if jax.default_backend() == "cpu" else rounded


def numbers(array: Any, dtype: Any = jnp.float32) -> Any:
    """The numbers of an array that may be narrow."""
    bits = jax.lax.bitcast_convert_type(array, jnp.bfloat16) if array.dtype == jnp.uint16 else array
    return bits.astype(dtype)


class Adapted(NamedTuple):
    """A frozen matrix [D,F] that computes as matrix + a b, with a [D,K] and b [K,F]. A weight of `product` may be one,
    and so may a parameter of a module of Flax, which looks at the first of the three only."""

    matrix: Any
    a: Any
    b: Any


def product(x_BTD: Float[Array, "B T D"], w: Any, *, is_table: bool = False) -> Float[Array, "B T F"]:
    """x w in the dtype of x, for a weight [D,F], or a table [F,D] that is turned over. A narrow weight is a frozen one,
    and has no gradient."""
    if not isinstance(w, Adapted) and not is_narrow(w):
        return _product(x_BTD, w.T if is_table else w)
    matrix, *adapter = w if isinstance(w, Adapted) else (w,)
    y_RF: Any = _frozen_product(x_BTD.reshape(-1, x_BTD.shape[-1]), matrix, tuple(adapter), is_table)
    return y_RF.reshape(*x_BTD.shape[:-1], -1)


@jax.custom_vjp
def _product(x_BTD: Float[Array, "B T D"], w_DF: Float32[Array, "D F"]) -> Float[Array, "B T F"]:
    """Plain autodiff forms the transpose of the gradient of w and turns it over, and it keeps three axes where XLA on
    CPU is faster with two: then a layer takes 6 % more time."""
    return _product_forward(x_BTD, w_DF)[0]


def _product_forward(x_BTD, w_DF):
    return x_BTD @ w_DF.astype(x_BTD.dtype), (x_BTD, w_DF)


def _product_backward(saved, g_BTF):
    x_BTD, w_DF = saved
    x, g = x_BTD.reshape(-1, x_BTD.shape[-1]), g_BTF.reshape(-1, g_BTF.shape[-1])
    gx_BTD = (g @ w_DF.T.astype(g.dtype)).reshape(x_BTD.shape)
    return gx_BTD, jnp.matmul(x.T, g, preferred_element_type=jnp.float32)


_product.defvjp(_product_forward, _product_backward)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _frozen_product(x_RD, matrix, adapter: tuple, is_table: bool):
    """x W + (x a) b: the sum of the matrices is never formed, nor is the gradient of W, which has that shape too."""
    return _frozen_product_forward(x_RD, matrix, adapter, is_table)[0]


# One equation in a jaxpr, for those who save the results of products.
frozen_product_p = Primitive("frozen_product")


def _frozen_product_forward(x_RD, matrix, adapter, is_table):
    return frozen_product_p.bind(x_RD, matrix, *adapter, is_table=is_table), (x_RD, matrix, adapter)


def _frozen_product_backward(is_table, saved, g_RF):
    x_RD, matrix, adapter = saved
    if not adapter:
        return frozen_product_p.bind(g_RF, matrix, is_table=not is_table), None, ()
    a_DK, b_KF = (part.astype(g_RF.dtype) for part in adapter)
    gx_RD = frozen_product_p.bind(g_RF, matrix, adapter[1].T, adapter[0].T, is_table=not is_table)
    ga_DK, gb_KF = (
        jnp.matmul(left.T, right, preferred_element_type=jnp.float32)
        for left, right in ((x_RD, g_RF @ b_KF.T), (x_RD @ a_DK, g_RF))
    )
    return gx_RD, None, (ga_DK, gb_KF)


_frozen_product.defvjp(_frozen_product_forward, _frozen_product_backward)


def _whole_frozen_product(x_RD, matrix, *adapter, is_table: bool):
    matrix_DF = numbers(matrix.T if is_table else matrix, x_RD.dtype)
    return _with_adapter(jnp.matmul(x_RD, matrix_DF, preferred_element_type=jnp.float32), x_RD, adapter)


def _with_adapter(y_RF, x_RD, adapter):
    if adapter:
        a_DK, b_KF = (part.astype(x_RD.dtype) for part in adapter)
        y_RF = y_RF + jnp.matmul(x_RD @ a_DK, b_KF, preferred_element_type=jnp.float32)
    return y_RF.astype(x_RD.dtype)


def _frozen_product_on_cpu(x_RD, matrix, *adapter, is_table: bool):
    """A CPU multiplies in fp32. XLA would convert the matrices of all layers first, and hold them from the forward to
    the backward. So the bits depend on x, by a number that is 0 unless x is not finite, and with it the step. A large
    matrix is never in fp32 as a whole: a loop, which takes longer to compile, converts it in blocks."""
    if not is_narrow(matrix):
        return _whole_frozen_product(x_RD, matrix, *adapter, is_table=is_table)
    rows = x_RD.astype(jnp.float32)
    if matrix.size > LARGE_NUMBERS:
        return _with_adapter(_in_blocks(rows, matrix, is_table), x_RD, adapter)
    bits = jax.lax.bitcast_convert_type(matrix, jnp.uint16)
    matrix = numbers(bits ^ (rows[0, 0] != rows[0, 0]).astype(jnp.uint16))
    return _with_adapter(rows @ (matrix.T if is_table else matrix), x_RD, adapter)


def _in_blocks(rows, matrix, is_table: bool):
    """The last block reaches back where it has too few columns."""
    out_axis = 0 if is_table else 1
    n_out, n_in = matrix.shape[out_axis], matrix.shape[1 - out_axis]
    size = min(n_out, max(1, BLOCK_NUMBERS // n_in))

    def multiply(i, y_RF):
        start = jnp.minimum(i * size, n_out - size)
        block = numbers(jax.lax.dynamic_slice_in_dim(matrix, start, size, out_axis))
        return jax.lax.dynamic_update_slice_in_dim(y_RF, rows @ (block.T if is_table else block), start, 1)

    return jax.lax.fori_loop(0, -(-n_out // size), multiply, jnp.zeros((len(rows), n_out), jnp.float32))


@frozen_product_p.def_abstract_eval
def _shape_of_frozen_product(x_RD, matrix, *adapter, is_table: bool):
    del adapter
    return x_RD.update(shape=(x_RD.shape[0], matrix.shape[0 if is_table else 1]))


frozen_product_p.def_impl(jax.jit(frozen_product_p.bind, static_argnames="is_table"))
mlir.register_lowering(frozen_product_p, mlir.lower_fun(_whole_frozen_product, multiple_results=False))
mlir.register_lowering(frozen_product_p, mlir.lower_fun(_frozen_product_on_cpu, multiple_results=False), "cpu")


@jax.custom_vjp
def grouped_product(
    x_RD: Float[Array, "R D"], w_EDF: Float32[Array, "E D F"], sizes_E: Int[Array, " E"]
) -> Float[Array, "R F"]:
    """Each row times the matrix of its group, in the dtype of x; the first sizes_E[0] rows are group 0, and so on.

    The rows of a group are multiplied in blocks. The last block of a group reaches into the next one, whose own block
    comes later and writes over it, so that no row is moved and each is multiplied once or twice. On CPU this takes 2 to
    3 times as long as one product of all rows with one matrix, and `jax.lax.ragged_dot` 9 times with 8 groups: XLA
    multiplies each row by all matrices there, and on GPUs unless an experimental option is set."""
    return _grouped_product_forward(x_RD, w_EDF, sizes_E)[0]


# One equation in a jaxpr, for those who count products or save their results; with `transposed` the matrices are.
grouped_product_p = Primitive("grouped_product")


def _grouped_product_forward(x_RD, w_EDF, sizes_E):
    y_RF = grouped_product_p.bind(x_RD, _converted(w_EDF, x_RD.dtype), sizes_E, transposed=False)
    return y_RF, (x_RD, w_EDF, sizes_E)


def _grouped_product_backward(saved, g_RF):
    x_RD, w_EDF, sizes_E = saved
    gx_RD = grouped_product_p.bind(g_RF, _converted(w_EDF, g_RF.dtype), sizes_E, transposed=True)
    return gx_RD, None if is_narrow(w_EDF) else _sums_of_outer_products(x_RD, g_RF, sizes_E), None


grouped_product.defvjp(_grouped_product_forward, _grouped_product_backward)


def _converted(w_EDF, dtype):
    """Narrow matrices stay: each is converted where a block of rows is multiplied by it."""
    return w_EDF if is_narrow(w_EDF) else w_EDF.astype(dtype)


def _product_in_blocks(x_RD, w_EDF, sizes_E, *, transposed: bool):
    n_rows, n_out = len(x_RD), w_EDF.shape[1 if transposed else 2]
    contracted = (((1,), (1 if transposed else 0,)), ((), ()))
    size, n_blocks, block = _blocks(n_rows, sizes_E)
    x_RD = jnp.pad(x_RD, ((0, size), (0, 0)))

    def multiply(i, y_RF):
        group, start, _ = block(i)
        rows = jax.lax.dynamic_slice_in_dim(x_RD, start, size)
        product = jax.lax.dot_general(rows, numbers(w_EDF[group], rows.dtype), contracted)
        return jax.lax.dynamic_update_slice_in_dim(y_RF, product, start, 0)

    return jax.lax.fori_loop(0, n_blocks, multiply, jnp.zeros((n_rows + size, n_out), x_RD.dtype))[:n_rows]


def _sums_of_outer_products(x_RD, g_RF, sizes_E):
    """[E,D,F] in fp32: x^T g of each group."""
    size, n_blocks, block = _blocks(len(x_RD), sizes_E)
    x_RD, g_RF = (jnp.pad(rows, ((0, size), (0, 0))) for rows in (x_RD, g_RF))

    def add(i, sums_EDF):
        group, start, end = block(i)
        is_of_group = (start + jnp.arange(size) < end)[:, None]
        rows = jax.lax.dynamic_slice_in_dim(x_RD, start, size)
        rows = jnp.where(is_of_group, rows, jnp.zeros((), rows.dtype))
        of_block = jax.lax.dynamic_slice_in_dim(g_RF, start, size)
        return sums_EDF.at[group].add(jnp.matmul(rows.T, of_block, preferred_element_type=jnp.float32))

    shape = (len(sizes_E), x_RD.shape[1], g_RF.shape[1])
    return jax.lax.fori_loop(0, n_blocks, add, jnp.zeros(shape, jnp.float32))


def _blocks(n_rows: int, sizes_E: Int[Array, " E"]) -> tuple[int, Any, Callable]:
    """(rows of a block, number of blocks, function of a block's number: its group, its first row, the end of its
    group). A quarter of a mean group keeps the rows few that are multiplied twice."""
    sizes_E = jnp.asarray(sizes_E)
    quarter = max(1, n_rows // (4 * len(sizes_E)))
    size = min(max(1 << (quarter.bit_length() - 1), BLOCK_ROWS_MIN), BLOCK_ROWS_MAX)
    numbers_E = (sizes_E + size - 1) // size
    ends_E, last_blocks_E = jnp.cumsum(sizes_E), jnp.cumsum(numbers_E)

    def block(i):
        group = jnp.searchsorted(last_blocks_E, i, side="right")
        n_later = last_blocks_E[group] - i
        start = ends_E[group] - sizes_E[group] + (numbers_E[group] - n_later) * size
        return group, start, ends_E[group]

    return size, last_blocks_E[-1], block


@grouped_product_p.def_abstract_eval
def _shape_of_grouped_product(x_RD, w_EDF, sizes_E, *, transposed: bool):
    del sizes_E
    return x_RD.update(shape=(x_RD.shape[0], w_EDF.shape[1 if transposed else 2]))


grouped_product_p.def_impl(jax.jit(_product_in_blocks, static_argnames="transposed"))
mlir.register_lowering(grouped_product_p, mlir.lower_fun(_product_in_blocks, multiple_results=False))


@jax.custom_vjp
def permuted(x_RD: Float[Array, "R D"], order_R: Int[Array, " R"], inverse_R: Int[Array, " R"]) -> Float[Array, "R D"]:
    """The rows of x in an order. Its gradient is a look-up too, where plain autodiff adds rows one by one."""
    return _permuted_forward(x_RD, order_R, inverse_R)[0]


def _permuted_forward(x_RD, order_R, inverse_R):
    return x_RD[order_R], inverse_R


def _permuted_backward(inverse_R, g_RD):
    return g_RD[inverse_R], None, None


permuted.defvjp(_permuted_forward, _permuted_backward)


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
def causal_softmax(
    scores_BHTT: Float[Array, "B H T T"], window: int = 0, begins_BT: Int[Array, "B T"] | None = None
) -> Float[Array, "B H T T"]:
    """Softmax over the last axis, where query t sees the keys 0..t only, or those from begins[t] on; with a window the
    last `window` of them."""
    return _causal_softmax_forward(scores_BHTT, window, begins_BT)[0]


def _causal_softmax_forward(scores_BHTT, window: int, begins_BT):
    s = scores_BHTT.astype(jnp.float32)
    visible = jnp.tril(jnp.ones(s.shape[-2:], bool))
    if 0 < window < s.shape[-1]:
        visible = jnp.triu(visible, 1 - window)
    visible = jnp.reshape(visible, (1, 1, *s.shape[-2:]))
    if begins_BT is not None:
        visible = visible & (jnp.arange(s.shape[-1])[None, None, None] >= begins_BT[:, None, :, None])
    s = jnp.where(visible, s, -jnp.inf)
    e = jnp.exp(s - jnp.max(s, axis=-1, keepdims=True))
    y = (e / jnp.sum(e, axis=-1, keepdims=True)).astype(scores_BHTT.dtype)
    return y, y


def _causal_softmax_backward(window: int, y_BHTT, g_BHTT):
    # Where a key is hidden, y and its gradient are 0, so the mask is not needed again.
    del window
    y, g = y_BHTT.astype(jnp.float32), g_BHTT.astype(jnp.float32)
    return (y * (g - jnp.sum(g * y, axis=-1, keepdims=True))).astype(g_BHTT.dtype), None


causal_softmax.defvjp(_causal_softmax_forward, _causal_softmax_backward)
