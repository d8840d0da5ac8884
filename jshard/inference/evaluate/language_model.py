"""A model as lm_eval asks it: for log-likelihoods, and for texts until a stop."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]
from lm_eval.models.utils import (  # pyright: ignore[reportMissingImports]
    Collator,
    handle_stop_sequences,
    has_bos_prefix,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import (  # pyright: ignore[reportMissingImports]
    get_rolling_token_windows,
    make_disjoint_window,
    simple_parse_args_string,
)
from tqdm import tqdm  # pyright: ignore[reportMissingModuleSource]

from jshard.data.tokenizers.chat import Chat, load_chat
from jshard.data.tokenizers.tokenizer import FileTokenizer, Tokenizer
from jshard.inference.generation import Generator, Sampling
from jshard.inference.generation.decoding import NOTHING
from jshard.inference.generation.prompts import context_length
from jshard.inference.generation.scoring import padded_length, scores
from jshard.inference.generation.weight_placement import Placement
from jshard.system.errors import UserError, warn
from jshard.system.files.untrusted import parse_json
from jshard.system.formatting import one_line

_CHUNK = 16  # tokens between two looks for stops
_SAMPLING = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
# What other libraries take, too, if it changes nothing.
_NEUTRAL = {"num_beams": 1, "repetition_penalty": 1.0, "use_cache": True}
# As in transformers: what follows it is the template's end of a message.
_CONTINUED = "CONTINUE_FINAL_MESSAGE_TAG "


class LanguageModel(TemplateLM):
    """A decoder, as ``lm_eval.simple_evaluate(model=...)`` takes one.

    Every process of a job has all requests, and gets all results.

    ``batch_size`` requests are computed together, on all devices; bars show the
    progress if it ``shows``.

    Attributes:
      max_length: The model's context, in tokens.
      max_gen_toks: The most tokens to generate where a task does not say.
    """

    max_gen_toks = 256  # as lm_eval's other models

    def __init__(
        self,
        placement: Placement,
        tokenizer: Tokenizer,
        batch_size: int,
        *,
        shows: bool = False,
    ):
        super().__init__()
        self.max_length = context_length(placement.model)
        self._placement, self._batch_size = placement, batch_size
        self._tokens_of, self._shows = tokenizer, shows

    # Tokens.

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        if self._tokens_of.eos_id is None:
            raise UserError(
                "evaluate: the tokenizer names no eos_token, which lm_eval puts before "
                "texts without a context, and looks for at their ends"
            )
        return self._tokens_of.eos_id

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without a context."""
        begin = self._tokens_of.bos_id
        return self.eot_token_id if begin is None else begin

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Returns tokens, with special ones unless the text or the caller says no."""
        if add_special_tokens is None:
            begins = has_bos_prefix(string, self._text_of(self.prefix_token_id))
            add_special_tokens = not begins
        found = self._tokens_of.encode(string, special=add_special_tokens)
        size = getattr(self._placement.model.config, "vocab_size", None)
        if size is not None and np.max(found, initial=0) >= size:
            raise UserError(
                f"evaluate: the tokenizer has token {np.max(found)}, but the model's "
                f"vocabulary has {size}: is it another model's tokenizer?"
            )
        return found.tolist()

    def _text_of(self, token: int) -> str:
        return self._tokens_of.decode(np.array([token]), special=True)

    # Log-likelihoods; the base class makes tokens of contexts and continuations.

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        for asked, _, continuation in requests:
            if not 0 < len(continuation) <= self.max_length:
                raise UserError(
                    f"evaluate: {str(asked and asked[1])[:60]!r}: this continuation "
                    f"has {len(continuation)} tokens; it must have at least one, and "
                    f"the model's context of {self.max_length} at most"
                )
        texts = [(before, after) for _, before, after in requests]
        cut = sum(len(a) + len(b) > self.max_length + 1 for a, b in texts)
        self._say_cut(cut, len(texts))
        found: list[Any] = [None] * len(texts)
        with self._bar(len(texts), "loglikelihood") as bar:
            for part in scores(self._placement, texts, self._batch_size):
                for i, score in part:
                    found[i] = tuple(score)
                bar.update(len(part))
        return found

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Returns log-likelihoods of whole texts, read in windows of the context."""
        windows, owners = [], []
        for number, request in enumerate(requests):
            rolling = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for window in map(make_disjoint_window, rolling):
                windows.append((None, *window))
                owners.append(number)
        totals = [0.0] * len(requests)
        found = self._loglikelihood_tokens(windows)
        for number, (log_p, _) in zip(owners, found, strict=True):
            totals[number] += log_p
        return totals

    # Texts.

    def generate_until(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[str]:
        """Returns what follows each context, up to the first stop."""
        order = Collator(
            [request.args for request in requests],
            sort_fn=lambda asked: (-len(asked[0]), asked[0]),
            group_fn=lambda asked: asked[1],
            group_by="gen_kwargs",
        )
        found: list[str] = []
        cut = 0
        with self._bar(len(requests), "generate_until") as bar:
            for batch in order.get_batched(n=self._batch_size):
                contexts = [self.tok_encode(context) for context, _ in batch]
                texts, of_batch = self._generate(contexts, batch[0][1], len(found))
                found, cut = found + texts, cut + of_batch
                bar.update(len(batch))
        self._say_cut(cut, len(requests))
        return order.get_original(found)

    def _generate(
        self, contexts: list[list[int]], asked: Mapping[str, Any], seed: int
    ) -> tuple[list[str], int]:
        """Continues tokens of which the same is asked; and says how many were cut."""
        options: dict[str, Any] = dict(normalize_gen_kwargs(asked, self.max_gen_toks))
        end = self._text_of(self.eot_token_id)
        stops = handle_stop_sequences(options.pop("until"), end)
        length, sampling = options.pop("max_gen_toks"), sampling_of(options)
        room = self.max_length - length
        if room < 1:
            raise UserError(
                f"evaluate: max_gen_toks={length} leaves no room for a prompt in the "
                f"model's context of {self.max_length} tokens"
            )
        prompts = [tokens[-room:] or [self.prefix_token_id] for tokens in contexts]
        # Batches that are not full run the program of the others.
        spare = prompts[:1] * (self._batch_size - len(prompts))
        slots = padded_length(max(map(len, prompts)) + length, self.max_length)
        parts = Generator.at(self._placement).stream(
            [*prompts, *spare],
            length=length,
            sampling=sampling,
            stop_tokens=self._tokens_of.stop_ids,
            seed=seed,
            chunk=_CHUNK,
            slots=slots,
        )
        tokens: list[list[int]] = [[] for _ in prompts]
        texts = [""] * len(prompts)
        for part in parts:
            for row, new in enumerate(part[: len(prompts)]):
                tokens[row] += new[new != NOTHING].tolist()
                texts[row] = self._tokens_of.decode(np.array(tokens[row], np.int32))
            ended = part[: len(prompts), -1] == NOTHING
            if all(
                done or any(stop and stop in text for stop in stops)
                for done, text in zip(ended, texts, strict=True)
            ):
                break
        texts = [postprocess_generated_text(text, stops, None) for text in texts]
        return texts, sum(len(tokens) > room for tokens in contexts)

    # Chats.

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Returns a chat as the tokenizer's template writes it.

        Without a generation prompt, the last message goes on.
        """
        chat = self._chat()
        messages = [dict(message) for message in chat_history]
        if not add_generation_prompt:
            messages[-1]["content"] += _CONTINUED
        options: dict[str, Any] = {"add_generation_prompt": add_generation_prompt}
        try:
            text = chat.render(messages, **options)
        except UserError as error:  # some templates know no system messages
            rest = [message for message in messages if message["role"] != "system"]
            if len(rest) == len(messages):
                raise
            self._warn(f"{error}; the chats are written without their system messages")
            text = chat.render(rest, **options)
        if add_generation_prompt:
            return text
        begin, tag, _ = text.rpartition(_CONTINUED.strip())
        if not tag:
            raise UserError("evaluate: the chat template drops the last message's end")
        # A template may strip messages.
        return begin if _CONTINUED in text else begin.rstrip()

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Returns what tells the template from others."""
        return self._chat().digest

    @property
    def tokenizer_name(self) -> str:
        """What tells the tokenizer from others."""
        return self._tokens_of.digest

    def _chat(self) -> Chat:
        if not isinstance(self._tokens_of, FileTokenizer):
            raise UserError(
                "--apply_chat_template: the model's tokenizer is not a tokenizer.json, "
                "and has no chat template"
            )
        return load_chat(self._tokens_of, "--apply_chat_template")

    # What is shown.

    def _bar(self, total: int, what: str) -> Any:
        return tqdm(total=total, desc=f"{what} requests", disable=not self._shows)

    def _say_cut(self, number: int, total: int) -> None:
        if number:
            self._warn(
                f"{number} of {total} requests do not fit into the model's context of "
                f"{self.max_length} tokens: their beginnings are left out"
            )

    def _warn(self, text: str) -> None:
        if jax.process_index() == 0:
            warn(text)


def sampling_of(options: Mapping[str, Any]) -> Sampling:
    """Returns how tokens are chosen; a UserError if we cannot choose them so."""
    rest = {k: v for k, v in options.items() if k not in (*_SAMPLING, "do_sample")}
    unknown = {k: v for k, v in rest.items() if (k, v) not in _NEUTRAL.items()}
    if unknown:
        raise UserError(
            f"evaluate: generation is asked for with {unknown}; jshard knows "
            f"{', '.join(_SAMPLING)} and do_sample"
        )
    if not options["do_sample"]:
        return Sampling(0)
    return Sampling(**{k: type(v)(options.get(k, v)) for k, v in _SAMPLING.items()})


def read_gen_kwargs(text: str) -> dict[str, Any]:
    """Reads ``temperature=0.8,top_p=0.9`` as lm_eval does, or a JSON object.

    Raises:
      UserError: It is neither, or asks for what we cannot do.
    """
    where = f"--gen_kwargs={text}"
    is_json = text.lstrip().startswith("{")
    if not is_json and not all("=" in part for part in text.split(",")):
        raise UserError(
            f"{where}: must be KEY=VALUE,... or a JSON object, which can have lists"
        )
    try:
        found = parse_json(text) if is_json else simple_parse_args_string(text)
        options: dict[str, Any] = dict(normalize_gen_kwargs(found))
        length, until = options.pop("max_gen_toks"), options.pop("until")
        if not all(isinstance(stop, str) for stop in until):
            raise UserError("until must be texts")
        sampling_of(options)
    except (ValueError, TypeError, UserError) as error:
        raise UserError(f"{where}: {one_line(str(error))}") from error
    if length < 1:
        raise UserError(f"{where}: max_gen_toks={length} must be at least 1")
    return found
