"""Continues a batch of prompts of different lengths, or answers them."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jshard.inference.generation import decoding
from jshard.inference.generation.decoding import NOTHING, Rows
from jshard.inference.generation.prompts import (
    check_decodes,
    check_prompts,
    context_length,
    is_encoder_decoder,
    tokens_after,
)
from jshard.inference.generation.sampling import Sampling
from jshard.inference.generation.weight_placement import Placement, replicated, sharded
from jshard.sharding.layout.values import transfer
from jshard.sharding.settings.callers_mesh import own_mesh
from jshard.sharding.settings.state import TrainState
from jshard.sharding.step.fsdp import FSDP

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

    The prompts of an encoder-decoder are its encoder's inputs, and what is generated is
    the decoder's whole text.

    Its programs are compiled once for each shape, so keep it for further prompts.

    Args:
      model: an NNX model with ``init_cache`` and ``decode`` (``models/gpt.py``,
        ``models/llama.py``), or ``encode`` and ``decode`` (``models/t5.py``), over
        whole arrays. Its weights are copied to every device.
      devices: the devices to use, among which prompts are divided; one by default.

    Raises:
      UserError: the model cannot decode.
    """

    @own_mesh()
    def __init__(self, model: nnx.Module, devices: Sequence[Any] | None = None):
        check_decodes(model)
        self._start(replicated(model, devices or jax.devices()[:1]))

    @classmethod
    def sharded(cls, fsdp: FSDP, state: TrainState) -> "Generator":
        """Returns a Generator whose weights stay shards, gathered layer by layer."""
        return cls.at(sharded(fsdp, state))

    @classmethod
    def at(cls, placement: Placement) -> "Generator":
        """Returns a Generator whose weights are somewhere already."""
        generator = cls.__new__(cls)
        check_decodes(placement.model)
        generator._start(placement)
        return generator

    def _start(self, placement: Placement) -> None:
        self._placement = placement
        if not is_encoder_decoder(placement.model):
            context_length(placement.model)  # raises a UserError if it is not known

    @own_mesh()
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
        slots: int = 0,
    ) -> Iterator[np.ndarray]:
        """Yields the tokens that follow the prompts, some at a time.

        Args:
          prompts: token ids, at least one each.
          length: tokens to generate after each prompt; fewer where the context ends.
          sampling: how tokens are chosen; by default each at its own probability.
          stop_tokens: tokens that end a text, and are not returned.
          seed: row r is sampled with seed + r, whatever the other rows are.
          chunk: tokens a part, at most.
          slots: the room of a decoder's cache, if it is to be larger than needed, so
            that batches of many lengths run the same program.

        Yields:
          Tokens (rows, n), with ``NOTHING`` (-1) after the end of a row.

        Raises:
          UserError: a prompt is empty, longer than the context allows, or has tokens
            outside the vocabulary.
        """
        arrays = [np.asarray(prompt, np.int64).reshape(-1) for prompt in prompts]
        parts = self._parts(
            arrays,
            length,
            sampling or Sampling(),
            tuple(stop_tokens),
            seed,
            chunk,
            slots,
        )
        while True:
            with own_mesh():  # for one part; the caller's mesh is there between them
                part = next(parts, None)
            if part is None:
                return
            yield part

    def _parts(
        self,
        arrays: list[np.ndarray],
        length: int,
        sampling: Sampling,
        stop_tokens: tuple[int, ...],
        seed: int,
        chunk: int,
        slots: int,
    ) -> Iterator[np.ndarray]:
        model = self._placement.model
        check_prompts(model, arrays, length)
        counts = tokens_after(model, arrays, length)
        rows = self._read(arrays, counts, seed, slots)
        chunk = min(chunk, int(max(counts)))
        step = self._decode_steps(chunk, sampling, stop_tokens)
        earlier: Any = None  # the next part is computed while this one is read
        for _ in range(-(-int(max(counts)) // chunk)):
            rows, tokens = step(rows)
            if earlier is not None:
                yield (part := self._fetch(earlier, len(arrays)))
                if np.all(part[:, -1] == NOTHING):
                    return
            earlier = tokens
        yield self._fetch(earlier, len(arrays))

    def _read(
        self, prompts: list[np.ndarray], counts: np.ndarray, seed: int, slots: int
    ) -> Rows:
        """Returns rows that have read the prompts, and generate ``counts`` tokens."""
        devices = self._placement.devices
        spare = -len(prompts) % devices  # rows that are done
        filled = [*prompts, *prompts[:1] * spare]
        model = self._placement.model
        if is_encoder_decoder(model):
            cache = self._encoded(filled, int(max(counts)))
            last = [model.config.start_token] * len(prompts)
            position = np.zeros(len(prompts), int)
        else:
            position = np.array([len(prompt) - 1 for prompt in prompts])
            slots = max(slots, _rounded(max(position + 1 + counts)))
            cache = self._prefilled(filled, slots)
            last = [prompt[-1] for prompt in prompts]

        def column(values: Any, dtype: Any = np.int32) -> jax.Array:
            return self._placement.put(np.array([*values, *[0] * spare], dtype))

        seeds = ((seed + r) % 2**32 for r in range(len(prompts)))
        return Rows(
            column(last),
            column(position),
            column(position + counts),
            column(seeds, np.uint32),
            cache,
        )

    def _prefilled(self, prompts: list[np.ndarray], slots: int) -> Any:
        """Returns a cache with all tokens of the prompts but the last."""
        cache = self._empty_cache(len(prompts), slots)
        before = max(map(len, prompts)) - 1
        width = min(_rounded(before), _PREFILL)
        for start in range(0, before, _PREFILL):
            part = self._part([prompt[:-1] for prompt in prompts], start, width, cache)
            cache = self._prefill()(part).cache
        return cache

    def _encoded(self, prompts: list[np.ndarray], length: int) -> Any:
        """Returns an encoder-decoder's cache of the prompts."""
        width = _rounded(max(map(len, prompts)))
        return self._encode(_rounded(length))(self._part(prompts, 0, width)).cache

    def _part(
        self, prompts: list[np.ndarray], start: int, width: int, cache: Any = None
    ) -> _Prompts:
        """Returns tokens ``start`` to ``start + width`` of the prompts."""
        positions_BT = np.full((len(prompts), width), -1, np.int32)
        tokens_BT = np.zeros((len(prompts), width), np.int32)
        for row, prompt in enumerate(prompts):
            part = prompt[start : start + width]
            tokens_BT[row, : len(part)] = part
            positions_BT[row, : len(part)] = start + np.arange(len(part))
        return _Prompts(
            self._placement.put(tokens_BT), self._placement.put(positions_BT), cache
        )

    def _empty_cache(self, batch: int, slots: int) -> Any:
        shapes = jax.eval_shape(lambda: self._placement.model.init_cache(batch, slots))
        return jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype, device=self._placement.sharding),
            shapes,
        )

    def _fetch(self, tokens: jax.Array, rows: int) -> np.ndarray:
        """Returns the tokens of all rows, in every process."""
        return transfer.fetch(tokens)[:rows]

    def _prefill(self) -> Any:
        def prefill(model: Any, prompts: _Prompts) -> _Prompts:
            return prompts._replace(cache=decoding.prefill(model, *prompts))

        return self._placement.program("prefill", prefill)

    def _encode(self, length: int) -> Any:
        def encode(model: Any, prompts: _Prompts) -> _Prompts:
            mask_BS = prompts.positions_BT >= 0
            return prompts._replace(
                cache=model.encode(prompts.tokens_BT, mask_BS, length)
            )

        return self._placement.program(("encode", length), encode)

    def _decode_steps(self, count: int, sampling: Sampling, stop: tuple) -> Any:
        def steps(model: Any, rows: Rows) -> tuple[Rows, jax.Array]:
            return decoding.decode_steps(
                model, rows, count=count, sampling=sampling, stop_tokens=stop
            )

        return self._placement.program((count, sampling, stop), steps)


@own_mesh()
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
      model: an NNX model with ``init_cache`` and ``decode``, or an encoder-decoder with
        ``encode`` and ``decode``, which answers the prompts; it is copied to one
        device. Or a ``jshard.inference.generation.Generator``, for several devices, for
        sharded weights, or to compile only once for several calls.
      prompts: token ids, at least one each; with a tokenizer, texts.
      length: tokens to generate after each prompt; fewer where the context ends.
      temperature: divides the logits; 0 always takes the likeliest token.
      top_k: only the k likeliest tokens can be chosen; 0 is all.
      top_p: only the likeliest tokens can be chosen whose probabilities add up to p.
      stop_tokens: tokens that end a text, and are not returned.
      seed: row r is sampled with seed + r, whatever the other rows are.
      tokenizer: has ``encode(text)`` and ``decode(tokens)``, such as those of
        ``jshard.data.tokenizers.tokenizer``.

    Returns:
      What follows each prompt, or answers it: token ids, or texts with a tokenizer.

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
