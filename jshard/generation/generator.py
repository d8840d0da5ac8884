"""Continues a batch of prompts of different lengths."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jshard.errors import UserError
from jshard.fsdp import FSDP
from jshard.generation import decoding
from jshard.generation.decoding import NOTHING, Rows
from jshard.generation.placement import Placement, replicated, sharded
from jshard.generation.sampling import Sampling
from jshard.layout import transfer
from jshard.state import TrainState

_PREFILL = 512  # tokens of each prompt whose scores exist at a time
_ROUND = 64  # prompts of similar lengths run the same program
_CHUNK = 16  # tokens a call: a call costs tenths of a millisecond


class _Prompts(NamedTuple):
    """A part of each prompt, and the cache that it goes to."""

    tokens_BT: Any
    positions_BT: Any
    cache: Any


class Generator:
    """Continues prompts by decoding with a cache of keys and values.

    Its programs are compiled once for each shape, so keep it for further prompts.

    Args:
      model: an NNX model with ``init_cache`` and ``decode`` (``models/gpt.py``,
        ``models/llama.py``), over whole arrays. Its weights are copied to every device.
      devices: the devices to use, among which prompts are divided; one by default.

    Raises:
      UserError: the model cannot decode.
    """

    def __init__(self, model: nnx.Module, devices: Sequence[Any] | None = None):
        _check_decodes(model)
        self._start(replicated(model, devices or jax.devices()[:1]))

    @classmethod
    def sharded(cls, fsdp: FSDP, state: TrainState) -> "Generator":
        """Returns a Generator whose weights stay shards, gathered layer by layer."""
        generator = cls.__new__(cls)
        _check_decodes(fsdp.model(state))
        generator._start(sharded(fsdp, state))
        return generator

    def _start(self, placement: Placement) -> None:
        self._placement = placement
        self._context = decoding.context_length(placement.model)
        self._programs: dict[Any, Any] = {}

    @property
    def context(self) -> int:
        """The most tokens of a text, with its prompt."""
        return self._context

    def __call__(
        self, prompts: Sequence[Sequence[int] | np.ndarray], **options: Any
    ) -> list[list[int]]:
        """Returns what follows each prompt; the options are those of ``stream``."""
        tokens_BT = np.concatenate(list(self.stream(prompts, **options)), axis=1)
        return [row[row != NOTHING].tolist() for row in tokens_BT]

    def stream(
        self,
        prompts: Sequence[Sequence[int] | np.ndarray],
        *,
        length: int = 128,
        sampling: Sampling | None = None,
        stop_tokens: Sequence[int] = (),
        seed: int = 0,
        chunk: int = _CHUNK,
    ) -> Iterator[np.ndarray]:
        """Yields the tokens that follow the prompts, some at a time.

        Args:
          prompts: token ids, at least one each.
          length: tokens to generate after each prompt; fewer where the context ends.
          sampling: how tokens are chosen; by default each at its own probability.
          stop_tokens: tokens that end a text, and are not returned.
          seed: row r is sampled with seed + r, whatever the other rows are.
          chunk: tokens a part.

        Yields:
          Tokens (rows, chunk), with ``NOTHING`` (-1) after the end of a row.

        Raises:
          UserError: a prompt is empty, longer than the context allows, or has tokens
            outside the vocabulary.
        """
        arrays = [np.asarray(prompt, np.int64).reshape(-1) for prompt in prompts]
        self.check(arrays, length)
        rows = self._prefilled(arrays, length, seed)
        step = self._decode_steps(chunk, sampling or Sampling(), tuple(stop_tokens))
        longest = min(length, self.context - min(map(len, arrays)))
        earlier: Any = None  # the next part is computed while this one is read
        for _ in range(-(-longest // chunk)):
            rows, tokens = step(rows)
            if earlier is not None:
                yield (part := self._fetch(earlier, len(arrays)))
                if np.all(part[:, -1] == NOTHING):
                    return
            earlier = tokens
        yield self._fetch(earlier, len(arrays))

    def check(self, prompts: Sequence[np.ndarray], length: int) -> None:
        """Raises the UserErrors of ``stream``."""
        if not prompts:
            raise UserError("generate: there are no prompts")
        if length < 1:
            raise UserError(f"generate: length={length} must be at least 1")
        vocab_size = getattr(self._placement.model.config, "vocab_size", None)
        for number, prompt in enumerate(prompts, 1):
            where = f"prompt {number} of {len(prompts)}"
            if not len(prompt):
                raise UserError(f"{where} is empty; give at least one token")
            if len(prompt) >= self.context:
                raise UserError(
                    f"{where} has {len(prompt)} tokens, which leaves no room in the "
                    f"model's context of {self.context}; shorten it"
                )
            outside = (prompt < 0) | (prompt >= (vocab_size or np.inf))
            if np.any(outside):
                raise UserError(
                    f"{where} has token {prompt[outside][0]}, but the model's "
                    f"vocabulary has {vocab_size}: is it another model's tokenizer?"
                )

    def _prefilled(self, prompts: list[np.ndarray], length: int, seed: int) -> Rows:
        """Returns rows whose cache holds all tokens of the prompts but the last."""
        lengths = np.array(list(map(len, prompts)))
        slots = _rounded(min(lengths.max() + length, self.context))
        ends = np.minimum(lengths + length, self.context)
        devices = self._placement.devices
        batch = -(-len(prompts) // devices) * devices
        filled = [*prompts, *prompts[:1] * (batch - len(prompts))]
        cache = self._empty_cache(batch, slots)

        before = lengths.max() - 1
        width = min(_rounded(before), _PREFILL)
        for start in range(0, before, _PREFILL):
            positions_BT = np.full((batch, width), -1, np.int32)
            tokens_BT = np.zeros((batch, width), np.int32)
            for row, prompt in enumerate(filled):
                part = prompt[:-1][start : start + width]
                tokens_BT[row, : len(part)] = part
                positions_BT[row, : len(part)] = start + np.arange(len(part))
            part = _Prompts(self._put(tokens_BT), self._put(positions_BT), cache)
            cache = self._prefill()(part).cache

        def column(values: Any, dtype: Any = np.int32, spare: int = 0) -> jax.Array:
            extra = [spare] * (batch - len(prompts))  # rows that are done
            return self._put(np.array([*values, *extra], dtype))

        return Rows(
            column(prompt[-1] for prompt in prompts),
            column(lengths - 1),
            column(ends - 1),
            column(((seed + r) % 2**32 for r in range(len(prompts))), np.uint32),
            cache,
        )

    def _empty_cache(self, batch: int, slots: int) -> Any:
        shapes = jax.eval_shape(lambda: self._placement.model.init_cache(batch, slots))
        return jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype, device=self._placement.sharding),
            shapes,
        )

    def _put(self, array: np.ndarray) -> jax.Array:
        """Splits rows, which every process has, over the devices."""
        return jax.make_array_from_callback(
            array.shape, self._placement.sharding, lambda index: array[index]
        )

    def _fetch(self, tokens: jax.Array, rows: int) -> np.ndarray:
        """Returns the tokens of all rows, in every process."""
        return transfer.fetch(tokens)[:rows]

    def _prefill(self) -> Any:
        def prefill(model: Any, prompts: _Prompts) -> _Prompts:
            return prompts._replace(cache=decoding.prefill(model, *prompts))

        return self._program("prefill", prefill)

    def _decode_steps(self, count: int, sampling: Sampling, stop: tuple) -> Any:
        def steps(model: Any, rows: Rows) -> tuple[Rows, jax.Array]:
            return decoding.decode_steps(
                model, rows, count=count, sampling=sampling, stop_tokens=stop
            )

        return self._program((count, sampling, stop), steps)

    def _program(self, key: Any, fn: Any) -> Any:
        if key not in self._programs:
            self._programs[key] = self._placement.compile(fn)
        return self._programs[key]


def generate(
    model: nnx.Module | Generator,
    prompts: Sequence[Any],
    *,
    length: int = 128,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    stop_tokens: Sequence[int] = (),
    seed: int = 0,
    tokenizer: Any = None,
) -> list[Any]:
    """Continues prompts of different lengths as one batch.

    Args:
      model: an NNX model with ``init_cache`` and ``decode``, which is copied to one
        device; or a ``jshard.generation.Generator``, for several devices, for sharded
        weights, or to compile only once for several calls.
      prompts: token ids, at least one each; with a tokenizer, texts.
      length: tokens to generate after each prompt; fewer where the context ends.
      temperature: divides the logits; 0 always takes the likeliest token.
      top_k: only the k likeliest tokens can be chosen; 0 is all.
      top_p: only the likeliest tokens can be chosen whose probabilities add up to p.
      stop_tokens: tokens that end a text, and are not returned.
      seed: row r is sampled with seed + r, whatever the other rows are.
      tokenizer: has ``encode(text)`` and ``decode(tokens)``, such as those of
        ``jshard.training.tokenizer``.

    Returns:
      What follows each prompt: token ids, or texts with a tokenizer.

    Raises:
      UserError: a prompt is empty, longer than the context allows, or has tokens
        outside the vocabulary; the model cannot decode; or an option is invalid.
    """
    generator = model if isinstance(model, Generator) else Generator(model)
    encode = tokenizer.encode if tokenizer else np.asarray
    tokens = generator(
        list(map(encode, prompts)),
        length=length,
        sampling=Sampling(temperature, top_k, top_p),
        stop_tokens=stop_tokens,
        seed=seed,
    )
    if tokenizer is None:
        return tokens
    return [tokenizer.decode(np.asarray(row, np.int32)) for row in tokens]


def _rounded(count: int) -> int:
    return -(-int(count) // _ROUND) * _ROUND


def _check_decodes(model: Any) -> None:
    for name in ("init_cache", "decode"):
        if not callable(getattr(model, name, None)):
            raise UserError(
                f"generate: {type(model).__name__} has no method {name}; models/gpt.py "
                "and models/llama.py show what a model needs"
            )
