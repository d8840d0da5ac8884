"""Reading and writing config.json of Hugging Face's folders, for all models' maps.

transformers gives no error for a key that it does not know, and takes a value as it is.
Here every key is read, or known to change nothing, or refused by its name.
"""

import functools
import math
import reprlib
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple, Self

import jshard

Json = Mapping[str, Any]


def _shown(value: Any) -> str:
    """Returns a value as JSON spells it, in a few words."""
    names = {None: "null", True: "true", False: "false"}
    if value is None or isinstance(value, bool):
        return names[value]
    return reprlib.repr(value)


def _shown_key(key: Any) -> str:
    plain = isinstance(key, str) and key.replace("_", "").replace(".", "").isalnum()
    return key if plain and len(key) < 80 else _shown(key)


class UnknownKey(jshard.UserError):
    """A key that a map does not know, and that may matter.

    Attributes:
      unknown_key: its name, with dots for objects within objects; who knows that it
        changes nothing can say so by this name.
    """

    def __init__(self, message: str, key: str):
        super().__init__(message)
        self.unknown_key = key


class Kind(NamedTuple):
    """What a value may be."""

    must_be: str  # in words
    fits: Callable[[Any], bool]  # whether a value is of this kind

    @property
    def or_null(self) -> "Kind":
        """This kind, or null, which is not what a missing key means."""
        return Kind(f"{self.must_be}, or null", lambda x: x is None or self.fits(x))


def one_of(values: Iterable[Any]) -> Kind:
    """Returns the kind of values that are one of ``values``."""
    known = list(values)

    def fits(x: Any) -> bool:
        return any(x == value and type(x) is type(value) for value in known)

    return Kind(" or ".join(map(_shown, known)), fits)


COUNT = Kind("an integer above 0", lambda x: type(x) is int and 0 < x < 2**31)
INTEGER = Kind(
    "an integer that is not negative", lambda x: type(x) is int and 0 <= x < 2**31
)
POSITIVE = Kind("a number above 0", lambda x: _is_number(x) and x > 0)
NUMBER = Kind("a number that is not negative", lambda x: _is_number(x) and x >= 0)
FLAG = one_of([False, True])
COUNTS = Kind(
    "a list of integers above 0",
    lambda x: isinstance(x, list) and bool(x) and all(map(COUNT.fits, x)),
)
OBJECT = Kind("an object", lambda x: isinstance(x, dict))

# Our key of a model's config: config.json's, its default, and its kind.
Sizes = Mapping[str, tuple[str, Any, Kind]]

# What says nothing of what a model computes: where a file is from, what training and
# generation do, what is returned beside the logits.
_OF_ALL = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _attn_implementation_internal
    _commit_hash _experts_implementation _experts_implementation_internal
    _flash_attn_2_enabled _from_model_config _name_or_path _num_labels architectures
    attn_implementation auto_map bad_words_ids begin_suppress_tokens bos_token_id
    chunk_size_feed_forward classifier_dropout cross_attention_hidden_size
    decoder_start_token_id diversity_penalty do_sample dtype early_stopping
    encoder_no_repeat_ngram_size eos_token_id experts_implementation
    exponential_decay_length_penalty finetuning_task forced_bos_token_id
    forced_eos_token_id gradient_checkpointing id2label initializer_factor
    initializer_range is_llama_config keys_to_ignore_at_inference label2id
    length_penalty max_length max_sequence_length min_length model_max_length model_type
    n_special name_or_path neftune_noise_alpha no_repeat_ngram_size num_beam_groups
    num_beams num_labels num_return_sequences output_attentions output_hidden_states
    output_past output_scores pad_token_id predict_special_tokens prefix problem_type
    remove_invalid_values repetition_penalty return_dict return_dict_in_generate
    sep_token_id suppress_tokens task_specific_params temperature tf_legacy_loss
    tie_last_hidden_states tokenizer_class tokenizer_model_max_length
    tokenizer_padding_side top_k top_p torch_dtype torchscript transformers.js_config
    transformers_version transformers_weights typical_p unk_token_id unsloth_fixed
    unsloth_version use_bfloat16 use_cache use_flash_attention_2 use_flash_attn
    use_return_dict
    """.split()
)
# What makes any model another one, and may only be said in these ways.
# Names that transformers takes for others (its attribute_map), null included.
_OTHER_NAMES = frozenset(
    "hidden_size max_position_embeddings num_attention_heads num_hidden_layers".split()
)
_FIXED_IN_ALL = {
    "per_layer_config": (None, {}),
    "pruned_heads": (None, {}),
    "quantization_config": (None,),
    "rope_interleaved": (None, False),
    "tie_encoder_decoder": (None, False),
    "use_mrope": (None, False),
}


class ConfigJson:
    """A config.json, or an object within it, of which no key is passed over.

    Attributes:
      name: of the model's class.
    """

    def __init__(self, content: dict[str, Any], name: str, where: str = ""):
        self.name = name
        self._content, self._where = content, where
        self._left = set(content)

    @classmethod
    def of(
        cls,
        content: Json,
        known: Collection[str],
        fixed: Mapping[str, Collection[Any]] | None = None,
        also: Mapping[str, str] | None = None,
    ) -> Self:
        """Returns a reader for a model's class.

        Args:
          content: of the config.json.
          known: names of the classes that a map is for.
          fixed: keys that may only have some values, among them the default.
          also: names that older releases gave these classes, and model types, which
            stand for a class where none is named.

        Raises:
          UserError: it is another class, or one of these keys has another value.
        """
        also = also or {}
        names = content.get("architectures") or [also.get(_type(content), "none")]
        if not isinstance(names, list):
            names = [names]
        names = [also.get(x, x) if isinstance(x, str) else x for x in names]
        if not isinstance(names[0], str) or names[0] not in known:
            name = _shown_key(names[0])
            those = "that is" if len(known) == 1 else "those are"
            raise jshard.UserError(
                f"config.json: architecture {name} is not supported; {those} "
                f"{', '.join(known)}"
            )
        config = cls(dict(content), names[0])
        for key, values in {**_FIXED_IN_ALL, **(fixed or {})}.items():
            config.fix(key, values)
        return config

    def get(self, key: str, default: Any, kind: Kind) -> Any:
        """Returns the value of a key, or ``default`` where it is missing.

        Raises:
          UserError: the value is of another kind.
        """
        self._left.discard(key)
        if not self.has(key):
            return default
        value = self._content[key]
        if not kind.fits(value):
            raise self.error(key, f"it must be {kind.must_be}")
        return value

    def has(self, key: str) -> bool:
        """Returns whether the key is there."""
        return key in self._content

    def need(self, key: str, kind: Kind) -> Any:
        """Returns the value of a key; a UserError where it is missing."""
        if not self.has(key):
            raise jshard.UserError(
                f"config.json: {self.name} needs the key {self._where + key!r}"
            )
        return self.get(key, None, kind)

    def fix(self, key: str, values: Iterable[Any]) -> None:
        """Raises a UserError if a key is there with a value not in ``values``."""
        self.get(key, None, one_of(values))

    def within(self, key: str) -> "ConfigJson | None":
        """Returns the reader of an object, or None where it is missing or empty."""
        content = self.get(key, None, OBJECT.or_null)
        if not content:
            return None
        return ConfigJson(content, self.name, f"{self._where}{key}.")

    def __or__(self, other: "ConfigJson") -> "ConfigJson":
        """Returns the reader of both objects' keys; those of ``other`` win."""
        return ConfigJson(self._content | other._content, self.name, other._where)

    def finish(self, inert: Collection[str] = ()) -> None:
        """Raises an UnknownKey for a key that was not read and may matter.

        One that is off, by its value, is told of.

        Args:
          inert: keys that change nothing.
        """
        rest = sorted(self._left - set(inert) - (set() if self._where else _OF_ALL))
        for key in rest:
            off = any(self._content[key] is x for x in (None, False)) or (
                self._content[key] in ("", [], {})
            )
            if not off or key in _OTHER_NAMES:
                error = self.error(key, "jshard does not know this key")
                raise UnknownKey(str(error), self._where + key)
        if rest:
            keys = [_shown_key(self._where + key) for key in rest]
            _tell(
                "jshard: config.json has keys that jshard does not know, and that are "
                f"off (false, null or empty): {', '.join(keys)}"
            )

    def error(self, key: str, why: str) -> jshard.UserError:
        """Returns the error of a key's value."""
        value = _shown(self._content.get(key))
        return jshard.UserError(
            f"config.json: {_shown_key(self._where + key)}={value} of {self.name} is "
            f"not supported: {why}"
        )


def read_sizes(config: ConfigJson, sizes: Sizes) -> dict[str, Any]:
    """Returns keys of a model's config, lists as tuples."""
    found = {
        ours: config.get(key, default, kind)
        for ours, (key, default, kind) in sizes.items()
    }
    return {k: tuple(v) if isinstance(v, list) else v for k, v in found.items()}


def write_sizes(
    model: Mapping[str, Any], architecture: str, model_type: str, sizes: Sizes
) -> dict[str, Any]:
    """Returns the content of a config.json, as ``read_sizes`` reads it."""
    return {
        "architectures": [architecture],
        "model_type": model_type,
        **{theirs: model[ours] for ours, (theirs, *_) in sizes.items()},
    }


@functools.cache
def _tell(text: str) -> None:
    """Shows a line to the user, once."""
    print(text, file=sys.stderr, flush=True)


def _type(content: Json) -> str:
    found = content.get("model_type")
    return found if isinstance(found, str) else ""


def _is_number(x: Any) -> bool:
    return type(x) in (int, float) and abs(x) < 1e30 and not math.isnan(x)
