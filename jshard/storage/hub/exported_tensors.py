"""The tensors of an export: which there are, and their values."""

import dataclasses
import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import tensorstore

from jshard.sharding.layout.four_bit.base import FOUR_BIT
from jshard.storage.checkpoint import frozen
from jshard.storage.checkpoint.stored_arrays import open_stored
from jshard.storage.hub import peft
from jshard.storage.hub.adapters.modules_to_save import saved_layers, saved_places
from jshard.storage.hub.file_tensor import FileTensor
from jshard.storage.hub.huggingface_folder import is_huggingface, model_path
from jshard.storage.hub.merged_adapters import PARTS, Adapter, adapters
from jshard.storage.hub.safetensors_file import DTYPES, StoredTensor, find_tensors
from jshard.storage.hub.tensor_names import Index, tensor_names
from jshard.system.errors import UserError, some_of

# Each further thread would hold another chunk; one saturates a disk.
_ONE_THREAD = tensorstore.Context(
    {"data_copy_concurrency": {"limit": 1}, "file_io_concurrency": {"limit": 1}}
)


class Tensor(NamedTuple):
    """A tensor to write, or a part: an array of the checkpoint, or one layer of it."""

    name: str  # in the files
    source: str | StoredTensor  # the array's name, or a tensor in other files
    layer: Index  # and expert
    place: FileTensor
    dtype: np.dtype
    size: int  # bytes
    adapter: Adapter | None = None  # to be merged


Tensors = dict[str, Tensor]
Places = Mapping[str, FileTensor]  # in the files of Hugging Face, by our names


@dataclasses.dataclass(frozen=True)
class Exported:
    """What is exported of a checkpoint."""

    about: Mapping[str, Any]  # the checkpoint's metadata
    dtype: str | None = None  # of floating-point tensors; None is as trained
    ema: bool = False  # whether averages take the place of trained parameters

    def tensors(self, places: Places | None = None) -> Tensors:
        """Lists the tensors to write, by `_key`, those of an array beside each other.

        Args:
          places: Where the files have each, none at all if they lack it; None keeps
            their own names.

        Raises:
          UserError: There are no averages, or `places` lacks a tensor.
        """
        tensors, arrays = {}, self.about["arrays"]
        unknown: list[str] = []
        for stored, layers in tensor_names(self.about).items():
            array, source = arrays[stored], stored
            if self.ema and stored.startswith("params."):
                source = stored.replace("params.", "ema.", 1)
                if source not in arrays:
                    raise UserError(
                        "--ema: the checkpoint has no averages; train with "
                        "--config.policy.ema_decay=0.999, for example"
                    )
            if array["dtype"].startswith("key<"):
                raise UserError(f"{stored} holds random keys: safetensors cannot")
            if arrays[source]["shape"] != array["shape"]:
                raise UserError(f"{source} has another shape than {stored}")
            kind = self._dtype(array["dtype"])
            size = math.prod(array["shape"]) // len(layers) * kind.itemsize
            for layer, name in layers.items():
                place = FileTensor((name,)) if places is None else places.get(name)
                if place is None:
                    unknown.append(name)
                    continue
                if place.names and FOUR_BIT in array:
                    raise UserError(
                        f"{stored} is in 4 bits in the checkpoint: export the adapters "
                        "alone with --format=peft"
                    )
                if not place.is_for(array["shape"][len(layer) :]):
                    raise UserError(
                        f"{stored} of shape {array['shape']} is not what the recipe's "
                        f"map has for {name}: the run was of another model"
                    )
                for i, name in enumerate(place.names):
                    index = (*layer, i) if len(place.names) > 1 else layer
                    part = size // len(place.names)
                    tensors[_key(name, place)] = Tensor(
                        name, source, index, place, kind, part
                    )
        if unknown:
            raise UserError(
                f"--format=huggingface: the recipe's map lacks {some_of(unknown)}"
            )
        return tensors

    def merged(self, places: Places, heads: Mapping[str, str]) -> Tensors:
        """Lists the tensors of Hugging Face, with the adapters merged into them.

        What the checkpoint leaves out is in the folder that the run started from.

        Args:
          places: Where the files have each.
          heads: Tables that are written once more, without their adapters, and what
            they are called as heads.

        Raises:
          UserError: As of `tensors`, or that folder lacks something.
        """
        own = [
            name
            for stored, layers in tensor_names(self.about).items()
            if stored.endswith(PARTS)
            for name in layers.values()
        ]
        found = self.tensors({**places, **dict.fromkeys(own, _NOWHERE)})
        if frozen.KEY in self.about:
            found |= self._left_out(places, found)
        for table, head in heads.items():
            found[head] = found[places[table].names[0]]._replace(name=head)
        for path, adapter in adapters(self.about, ema=self.ema).items():
            place = peft.place_of(path, places) or _NOWHERE
            keys = [_key(name, place) for name in place.names]
            if not keys or not found.keys() >= set(keys):
                raise UserError(
                    f"the checkpoint's adapter {adapter.a} is for {path}, which is "
                    "not among the weights to write"
                )
            for i, key in enumerate(keys):
                index = (*adapter.layer, i) if len(keys) > 1 else adapter.layer
                one = adapter._replace(layer=index)
                found[key] = found[key]._replace(adapter=one)
        return found

    def adapters(self, places: Places) -> Tensors:
        """Lists the tensors of PEFT: adapters, and what else was trained.

        Raises:
          UserError: There are no adapters, or Hugging Face's files have no place for
            one.
        """
        adapters(self.about, ema=self.ema)  # checks them
        own = peft.places(peft.adapter_names(self.about), places)
        if not own:
            raise UserError("--format=peft: the checkpoint has no adapters")
        found = {
            name: _NOWHERE
            for layers in tensor_names(self.about).values()
            for name in layers.values()
        }
        saved = [
            x for names in saved_layers(self.about).values() for x in names.values()
        ]
        return self.tensors(found | own | saved_places(saved, places))

    def _left_out(self, places: Places, written: Tensors) -> Tensors:
        """Lists the tensors that are in the files of a pretrained model alone."""
        source = model_path(self.about[frozen.KEY]["path"])
        if not is_huggingface(source):
            reason = "is not a Hugging Face folder: export it first"
            if not source.exists():
                reason = "does not exist: put it back"
            raise UserError(
                f"--format=huggingface: the frozen parameters of the run are in "
                f"{source}, which {reason}, or export the adapters with --format=peft"
            )
        stored, found = find_tensors(source), {}
        if any(name.endswith(".absmax") for name in stored):
            raise UserError(
                f"--format=huggingface: {source} has weights in 4 bits, to which "
                "nothing can be added: export the adapters with --format=peft"
            )
        for place in places.values():
            spelled = place.named_as_in(stored).names
            for name, there in zip(place.names, spelled, strict=True):
                if (key := _key(name, place)) in written:
                    continue
                if there not in stored:
                    raise UserError(f"--format=huggingface: {source} lacks {there}")
                tensor = stored[there]
                if tensor.dtype not in DTYPES or not place.is_part_of(tensor.shape):
                    raise UserError(
                        f"--format=huggingface: {there} of {source} is "
                        f"{tensor.dtype}{list(tensor.shape)}, which the model's is not"
                    )
                kind = self._dtype(str(jnp.dtype(DTYPES[tensor.dtype])))
                size = math.prod(tensor.shape) // place.part[1] * kind.itemsize
                found[key] = Tensor(name, tensor, (), place, kind, size)
        return found

    def _dtype(self, stored: str) -> np.dtype:
        return jnp.dtype(self.dtype if self.dtype and "float" in stored else stored)


_NOWHERE = FileTensor(())  # not in the files


def _key(name: str, place: FileTensor) -> str:
    """Returns a name for a tensor, or for its part."""
    number, count = place.part
    return name if count == 1 else f"{name}[{number} of {count}]"


def sizes(tensors: Tensors) -> dict[str, int]:
    """Returns the bytes of tensors, by their names in the files."""
    found: dict[str, int] = {}
    for tensor in tensors.values():
        found[tensor.name] = found.get(tensor.name, 0) + tensor.size
    return found


def read(
    step: Path, about: Mapping[str, Any], tensors: Tensors
) -> dict[str, np.ndarray]:
    """Reads tensors from a checkpoint, casting them as they are copied.

    The layers of an array are read together, because a stored chunk may span them all.

    Args:
      step: The checkpoint's folder.
      about: Its metadata.
      tensors: What to read.

    Returns:
      The tensors by their names in the files, of which all parts must be given.

    Raises:
      UserError: The checkpoint's arrays are gone, or not as its metadata says.
    """
    found: dict[str, np.ndarray] = {}
    for source, group in itertools.groupby(tensors, lambda name: tensors[name].source):
        names = list(group)
        if isinstance(source, StoredTensor):
            for name in names:
                part = tensors[name].place.of_tensor(source.open())
                found[name] = np.array(part, tensors[name].dtype)
            continue
        first, last = tensors[names[0]], tensors[names[-1]]
        store = open_stored(step, about, source, _ONE_THREAD)
        if first.layer:
            store = store[first.layer[0] : last.layer[0] + 1]
        store = store.transpose(first.place.axes(store.ndim))
        try:
            values = tensorstore.cast(store, first.dtype).read().result()
        except ValueError as error:
            raise UserError(f"cannot read {source} of {step}: {error}") from error
        for name in names:
            layer = tensors[name].layer
            if layer:
                layer = layer[0] - first.layer[0], *layer[1:]
            found[name] = values[(*layer, ...)]
    for name, tensor in tensors.items():
        if tensor.adapter is not None:
            turned = np.swapaxes if tensor.place.transposed else lambda x, *_: x
            weight = turned(found[name], 0, 1)
            weight = tensor.adapter.merge(weight, step, about, _ONE_THREAD)
            found[name] = turned(weight, 0, 1).astype(tensor.dtype, order="C")
    return _joined(tensors, found)


def _joined(
    tensors: Tensors, values: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Returns the whole tensors of parts, by their names in the files."""
    parts: dict[str, list[tuple[int, np.ndarray]]] = {}
    for key, tensor in tensors.items():
        number, _ = tensor.place.part
        parts.setdefault(tensor.name, []).append((number, values[key]))
    return {
        name: found[0][1]
        if len(found) == 1
        else np.concatenate([part for _, part in sorted(found, key=lambda x: x[0])])
        for name, found in parts.items()
    }
