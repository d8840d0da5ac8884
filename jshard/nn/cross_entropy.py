"""Cross-entropy of a linear head that keeps no logits, in chunks of tokens.

The forward has all that the gradient of softmax cross-entropy needs: while a chunk's
logits exist, their gradients are computed and multiplied into those of features and
head. The backward only scales these by its cotangent. That takes three matrix products,
where checkpointed chunks take four: the fused linear cross-entropy of Hsu et al. 2024
(Liger Kernel, arXiv:2410.10989, section 3.2).

Shape suffixes: B batch, T time, N tokens (B times T), C tokens of a chunk, D width,
V vocabulary.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jshard.sharding.settings.loss import Mean
from jshard.sharding.settings.mesh import TENSOR, on_gpus, sequence_axes
from jshard.sharding.settings.precision import is_float
from jshard.system.errors import UserError


def cross_entropy(
    x_BTD: jax.Array,
    head_DV: jax.Array,
    targets_BT: jax.Array,
    weights_BT: jax.Array,
    *,
    chunk: int,
    soft_cap: float | None = None,
    vocabulary: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Mean:
    """Computes the cross-entropy of ``softmax(x @ head)``, ``chunk`` tokens at a time.

    Matrix products take operands in the dtype of ``x``, to which the head is cast, and
    accumulate in float32 (float64 for float64). Logits, losses and the sum of the
    head's gradient over chunks have that wider dtype too; the gradient is rounded to
    the head's dtype at the end. Features, head and weights are differentiable in
    reverse mode; ``jax.jvp`` is not supported.

    Args:
      x_BTD: features; any number of dimensions before D.
      head_DV: the head with full weights (``jshard.gathered``), or if ``vocabulary``
        is given, maybe this device's part of its columns.
      targets_BT: integer tokens; one outside [0, V) makes the loss nan, unless its
        weight is 0.
      weights_BT: 1 for a token that counts, 0 for padding, or anything in between. A
        token of weight 0 adds nothing to loss and gradients, even if its features are
        infinite or nan.
      chunk: the largest number of tokens, on one device, whose logits exist at a time.
      soft_cap: c in ``c tanh(logit / c)``, as in Gemma 2 (arXiv:2408.00118, section 2).
      vocabulary: the columns of the whole head; by default those of ``head_DV``. If
        there are more, the head is split over "tensor", with padding at the end if
        these devices do not divide them.
      label_smoothing: PyTorch's: share of each target for the whole vocabulary.
      z_loss: factor of the square of ``logsumexp(logits)``, which is added to a token's
        loss (PaLM, arXiv:2204.02311, section 5).

    Returns:
      The total in nats and the sum of weights.

    Raises:
      UserError: shapes do not match, a dtype is of the wrong kind, or an option is
        out of range.
    """
    _check(x_BTD, head_DV, targets_BT, weights_BT, chunk)
    if not 0 <= label_smoothing < 1 or z_loss < 0:
        raise UserError(
            f"cross_entropy: label_smoothing={label_smoothing} must be in [0, 1), and "
            f"z_loss={z_loss} at least 0"
        )
    more = {"label_smoothing": label_smoothing, "z_loss": z_loss}
    options = _options(head_DV, chunk, soft_cap, vocabulary)._replace(**more)
    wide = jnp.promote_types(x_BTD.dtype, jnp.float32)
    weights_BT = jnp.asarray(weights_BT, wide)
    inputs = [*_flat(x_BTD, head_DV, targets_BT), weights_BT.reshape(-1)]
    return Mean(_total(options, inputs), jnp.sum(weights_BT))


def token_log_probs(
    x_BTD: jax.Array,
    head_DV: jax.Array,
    targets_BT: jax.Array,
    *,
    chunk: int,
    soft_cap: float | None = None,
    vocabulary: int | None = None,
) -> jax.Array:
    """Computes each target's logarithm of ``softmax(x @ head)``, for other losses.

    Keeps no logits either: the backward computes those of a chunk again, which takes
    four matrix products in all. Arguments, dtypes and errors are those of
    ``cross_entropy``, whose weighted sum of the negative results this is.

    Returns:
      Log-probabilities (B, T), of tokens that do not count, too: leave them out with
      ``jnp.where``, after which their gradients are zero.
    """
    _check(x_BTD, head_DV, targets_BT, targets_BT, chunk)
    options = _options(head_DV, chunk, soft_cap, vocabulary)
    loss_N: jax.Array = _token_losses(options, _flat(x_BTD, head_DV, targets_BT))
    return -loss_N.reshape(targets_BT.shape)


class _Options(NamedTuple):
    """Options of a call, named as its arguments."""

    chunk: int
    soft_cap: float | None
    vocabulary: int
    split: bool  # whether the head has only this device's part of the columns
    label_smoothing: float = 0.0
    z_loss: float = 0.0


def _options(
    head_DV: jax.Array, chunk: int, soft_cap: float | None, vocabulary: int | None
) -> _Options:
    columns = head_DV.shape[1]
    parts = lax.axis_size(TENSOR) if TENSOR in sequence_axes() else 1
    vocabulary = vocabulary or columns
    last = vocabulary - columns * (parts - 1)  # columns of the last device
    if vocabulary != columns and not 0 < last <= columns:
        raise UserError(
            f"cross_entropy: vocabulary={vocabulary} is neither the head's {columns} "
            f"columns nor those of {parts} devices"
        )
    return _Options(chunk, soft_cap, vocabulary, vocabulary != columns)


def _flat(
    x_BTD: jax.Array, head_DV: jax.Array, targets_BT: jax.Array
) -> list[jax.Array]:
    """Returns features (N, D), the head, and targets (N,)."""
    x_ND = x_BTD.reshape(-1, x_BTD.shape[-1])
    return [x_ND, head_DV, targets_BT.reshape(-1).astype(jnp.int32)]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _total(options: _Options, inputs: list[jax.Array]) -> jax.Array:
    """Computes the weighted sum of losses, when nothing is differentiated."""
    *of_tokens, weights_N = inputs
    return _weighted_sum(_token_losses(options, of_tokens), weights_N)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _token_losses(options: _Options, inputs: list[jax.Array]) -> jax.Array:
    """Computes the loss of each token, (N,)."""
    x_ND, head_DV, targets_N = inputs
    head_DV = head_DV.astype(x_ND.dtype)

    def losses_of(chunk: tuple) -> jax.Array:
        x_CD, targets_C = _tokens_of_all(chunk) if options.split else chunk
        loss_C, _ = _losses(x_CD, head_DV, targets_C, options)
        return _own_tokens(loss_C) if options.split else loss_C

    chunks = tuple(_in_chunks(options.chunk, x) for x in (x_ND, targets_N))
    return lax.map(losses_of, chunks).reshape(-1)[: len(x_ND)]


def _forward(options: _Options, inputs: list[jax.Array]) -> tuple[jax.Array, tuple]:
    """Computes the weighted sum of losses, and its gradients as residuals."""
    x_ND, head_DV, targets_N, weights_N = inputs
    N, D = x_ND.shape
    split, chunk = options.split, options.chunk
    dtype, wide = x_ND.dtype, weights_N.dtype
    cast_DV = head_DV.astype(dtype)
    half, scale = dtype == jnp.float16, 1
    if half:  # most softmax values are too small, and so may be cotangents as weights
        largest = jnp.max(jnp.abs(weights_N))
        largest = lax.pmax(largest, TENSOR) if split else largest
        scale = 4096 / jnp.maximum(largest, 1e-30)

    def body(dhead_DV: jax.Array, chunk: tuple) -> tuple[jax.Array, tuple]:
        x_CD, targets_C, weights_C = _tokens_of_all(chunk) if split else chunk
        loss_C, dlogits_CV = _losses(x_CD, cast_DV, targets_C, options)
        # Of a token that does not count, nothing is multiplied: it may be infinite.
        counts_C1 = (weights_C != 0)[:, None]
        dlogits_CV = jnp.where(counts_C1, dlogits_CV * weights_C[:, None], 0)
        dlogits_CV, x_CD = dlogits_CV.astype(dtype), jnp.where(counts_C1, x_CD, 0)
        dx_CD = jnp.dot(dlogits_CV, cast_DV.T, preferred_element_type=wide) / scale
        dhead_DV += jnp.dot(x_CD.T, dlogits_CV, preferred_element_type=wide)
        dx_CD = dx_CD.astype(wide if half else dtype)
        if split:
            loss_C = _own_tokens(loss_C)
            dx_CD = lax.psum_scatter(dx_CD, TENSOR, scatter_dimension=0, tiled=True)
        return dhead_DV, (loss_C, dx_CD)

    zeros_DV = jnp.zeros(head_DV.shape, wide)
    chunks = tuple(_in_chunks(chunk, x) for x in (x_ND, targets_N, weights_N * scale))
    dhead_DV, (losses, dx) = lax.scan(body, zeros_DV, chunks)
    loss_N, dx_ND = losses.reshape(-1)[:N], dx.reshape(-1, D)[:N]
    dtypes = (x_ND[:0], head_DV[:0])
    # The gradient of a weight is the token's loss, where that is a number.
    known_N = jnp.where((weights_N != 0) | jnp.isfinite(loss_N), loss_N, 0)
    residuals = (dx_ND, dhead_DV / scale, known_N, dtypes)
    return _weighted_sum(loss_N, weights_N), residuals


def _backward(options: _Options, residuals: tuple, cotangent: jax.Array) -> tuple[list]:
    dx_ND, dhead_DV, loss_N, (x, head) = residuals
    if options.split:
        # The head's gradient is of the tokens of all devices, with one cotangent.
        least, most = (f(cotangent, TENSOR) for f in (lax.pmin, lax.pmax))
        cotangent = jnp.where(least == most, cotangent, jnp.nan)
    dx_ND = (cotangent * dx_ND).astype(x.dtype)
    dhead_DV = (cotangent * dhead_DV).astype(head.dtype)
    return ([dx_ND, dhead_DV, None, cotangent * loss_N],)


_total.defvjp(_forward, _backward)


def _losses_and_inputs(options: _Options, inputs: list[jax.Array]) -> tuple:
    return _token_losses(options, inputs), inputs


def _backward_of_losses(
    options: _Options, inputs: list[jax.Array], cotangent_N: jax.Array
) -> tuple[list]:
    """Returns the gradients of the sum that has the cotangents as weights."""
    x_ND, head_DV, _ = inputs
    _, (dx_ND, dhead_DV, *_) = _forward(options, [*inputs, cotangent_N])
    return ([dx_ND.astype(x_ND.dtype), dhead_DV.astype(head_DV.dtype), None],)


_token_losses.defvjp(_losses_and_inputs, _backward_of_losses)


def _losses(
    x_CD: jax.Array, head_DV: jax.Array, targets_C: jax.Array, options: _Options
) -> tuple[jax.Array, jax.Array]:
    """Computes losses (C,) and their gradients by the head's products (C, V)."""
    V, soft_cap, split = head_DV.shape[1], options.soft_cap, options.split
    spread, each = options.label_smoothing, options.label_smoothing / options.vocabulary
    wide = jnp.promote_types(x_CD.dtype, jnp.float32)
    logits_CV = jnp.dot(x_CD, head_DV, preferred_element_type=wide)
    if soft_cap is not None:
        logits_CV = soft_cap * jnp.tanh(logits_CV / soft_cap)
    is_real_V = None
    if split and V * lax.axis_size(TENSOR) != options.vocabulary:  # the last: padding
        is_real_V = jnp.arange(V) < options.vocabulary - lax.axis_index(TENSOR) * V
        logits_CV = jnp.where(is_real_V, logits_CV, jnp.finfo(wide).min)
    if on_gpus():  # CPUs take longer for it
        sum_C = _logsumexp_in_one_pass(logits_CV)
    else:
        sum_C = jax.nn.logsumexp(logits_CV, axis=1)
    own_C = targets_C - lax.axis_index(TENSOR) * V if split else targets_C
    own_C1 = own_C[:, None]
    target_C = jnp.take_along_axis(logits_CV, own_C1, 1, mode="clip")[:, 0]
    if split:
        target_C = jnp.where((own_C >= 0) & (own_C < V), target_C, 0)
    if spread:
        real_CV = logits_CV if is_real_V is None else jnp.where(is_real_V, logits_CV, 0)
        target_C = (1 - spread) * target_C + each * jnp.sum(real_CV, axis=1)
    if split:
        largest_C = lax.pmax(sum_C, TENSOR)
        parts = jnp.exp(sum_C - largest_C), target_C
        total_C, target_C = lax.psum(parts, TENSOR)
        sum_C = largest_C + jnp.log(total_C)
    inside_C = (targets_C >= 0) & (targets_C < options.vocabulary)
    loss_C = jnp.where(inside_C, sum_C - target_C, jnp.nan)
    target_CV: jax.Array = own_C1 == jnp.arange(V)
    if spread:
        target_CV = (1 - spread) * target_CV.astype(wide) + each
    softmax_CV = jnp.exp(logits_CV - sum_C[:, None])
    if z_loss := options.z_loss:
        loss_C += z_loss * sum_C**2
        softmax_CV *= 1 + 2 * z_loss * sum_C[:, None]
    gradient_CV = softmax_CV - target_CV
    if soft_cap is not None:
        gradient_CV *= 1 - (logits_CV / soft_cap) ** 2
    if is_real_V is not None:
        gradient_CV = jnp.where(is_real_V, gradient_CV, 0)
    return loss_C, gradient_CV


def _tokens_of_all(chunk: tuple) -> list[jax.Array]:
    """Returns arrays (C, ...) with the tokens of all devices that share the head."""
    return [lax.all_gather(x, TENSOR, tiled=True) for x in chunk]


def _own_tokens(x_C: jax.Array) -> jax.Array:
    """Returns this device's part of an array of the tokens of all."""
    size = x_C.shape[0] // lax.axis_size(TENSOR)
    return lax.dynamic_slice_in_dim(x_C, lax.axis_index(TENSOR) * size, size)


def _logsumexp_in_one_pass(logits_CV: jax.Array) -> jax.Array:
    """Computes the logarithm of the sum of exponentials, (C,), in one pass.

    Each partial sum is relative to the largest logit so far (Milakov and Gimelshein
    2018, arXiv:1805.02867, section 3), so that the logits are read once.
    """

    def add(one: tuple, other: tuple) -> tuple:
        (max_a, sum_a), (max_b, sum_b) = one, other
        largest = jnp.maximum(max_a, max_b)
        total = sum_a * jnp.exp(max_a - largest) + sum_b * jnp.exp(max_b - largest)
        return largest, total

    dtype = logits_CV.dtype
    start = (jnp.finfo(dtype).min.astype(dtype), jnp.zeros((), dtype))
    pairs = (logits_CV, jnp.ones_like(logits_CV))
    max_C, sum_C = lax.reduce(pairs, start, add, (1,))
    return max_C + jnp.log(sum_C)


def _weighted_sum(loss_N: jax.Array, weights_N: jax.Array) -> jax.Array:
    return jnp.sum(jnp.where(weights_N == 0, 0, loss_N * weights_N))


def _in_chunks(chunk: int, x: jax.Array) -> jax.Array:
    """Splits ``x``, (N, ...), into equal chunks (N/C, C, ...), padded with zeros."""
    number = -(-len(x) // chunk)
    size = -(-len(x) // number)
    padding = [(0, number * size - len(x)), *[(0, 0)] * (x.ndim - 1)]
    return jnp.pad(x, padding).reshape(number, size, *x.shape[1:])


def _check(x: Any, head: Any, targets: Any, weights: Any, chunk: Any) -> None:
    tokens, width = x.shape[:-1], x.shape[-1:]
    for name, shape, expected, fits in (
        ("head", head.shape, (*width, "vocabulary"), (*width, *head.shape[-1:])),
        ("targets", targets.shape, tokens, tokens),
        ("weights", weights.shape, tokens, tokens),
    ):
        if shape != fits:
            raise UserError(
                f"cross_entropy: {name} has shape {shape}; for x of shape {x.shape} it "
                f"must be {expected}"
            )
    if 0 in x.shape:
        raise UserError(f"cross_entropy: x of shape {x.shape} is empty")
    if not is_float(x) or not is_float(head):
        raise UserError(
            f"cross_entropy: x is {x.dtype} and head is {head.dtype}; both must be "
            "floating"
        )
    if not jnp.issubdtype(targets.dtype, jnp.integer):
        raise UserError(
            f"cross_entropy: targets is {targets.dtype}; it must hold integers"
        )
    if not isinstance(chunk, int) or chunk < 1:
        raise UserError(f"cross_entropy: chunk={chunk!r} must be a positive integer")
