"""A place in a stream: the next item, and the state that leads back to it.

The libraries that can go on where they were have `state_dict` and `load_state_dict`, or
`get_state` and `set_state`: on what is iterated over (Hugging Face's `datasets`,
torchdata's `StatefulDataLoader`), which is told before `iter()`, or on the iterator
(Grain), which is told after.
"""

import copy
import sys
from collections.abc import Callable, Iterator
from typing import Any

from jshard.data.loader_processes import opening_loader
from jshard.system.compat.data_loaders import allow_grain_processes, end_iterator
from jshard.system.errors import UserError

_METHODS = (("get_state", "set_state"), ("state_dict", "load_state_dict"))
_Methods = tuple[Callable[[], Any], Callable[[Any], None]]


def state_methods(source: Any) -> _Methods | None:
    """Returns what gets and what sets an object's state; None if it has none."""
    for get, set_ in _METHODS:
        if callable(getattr(source, get, None)) and hasattr(source, set_):
            return getattr(source, get), getattr(source, set_)
    return None


def is_torch(data: Any, name: str) -> bool:
    """Returns whether an object is of a class of `torch.utils.data`."""
    torch: Any = sys.modules.get("torch.utils.data")  # else it cannot be
    return torch is not None and isinstance(data, getattr(torch, name))


class Cursor(Iterator[Any]):
    """A place in a source, which it opens again for each epoch.

    Args:
      kind: What the source is, in words.
      open_source: Returns the source, to be read from its beginning.
      repeat: Whether to start again at its end.

    Attributes:
      epoch: How often the source was read to its end.
      batched: Whether items are batches, as those of PyTorch's loaders are.
      resumes: Whether `state` leads back; if not, only reading from the start does.
    """

    def __init__(self, kind: str, open_source: Callable[[], Any], *, repeat: bool):
        self._kind, self._open, self._repeat = kind, open_source, repeat
        self.epoch, self._seed = 0, 0
        allow_grain_processes()
        self._begin(None)

    def _begin(self, state: Any) -> None:
        """Opens the source, where a state says or at its beginning."""
        source = self._open()
        for one in (source, getattr(source, "dataset", source)):  # a loader's
            if hasattr(one, "set_epoch"):  # of `datasets`, for another order
                one.set_epoch(self.epoch)
        self.batched = is_torch(source, "DataLoader")
        methods = None if hasattr(source, "__next__") else state_methods(source)
        if methods and self.batched and source.generator is not None:
            # Its state has the order of an epoch, but not that of the next one.
            self._seed = self._seed or source.generator.initial_seed()
            source.generator.manual_seed(self._seed + self.epoch)
        if methods and state is not None:
            methods[1](copy.deepcopy(state))
        with opening_loader():
            self._source, self._items = source, iter(source)
        if not methods and (methods := state_methods(self._items)):
            if state is not None:
                methods[1](copy.deepcopy(state))
        self.resumes = methods is not None
        self._get = methods and methods[0]
        self._began_at, self._moved = state, False

    def __next__(self) -> Any:
        """Returns the next item.

        Raises:
          UserError: An epoch has no examples.
          StopIteration: The source has ended, and is not to be repeated.
        """
        while True:
            for item in self._items:
                self._moved = True
                return item
            if not self._moved and self._began_at is None:
                again = " when it is read again" if self.epoch else ""
                raise UserError(f"data: {self._kind} has no examples{again}")
            if not self._repeat:
                raise StopIteration
            self.epoch += 1
            self._begin(None)

    def close(self) -> None:
        """Ends what the source has started to be read, such as processes."""
        if self._items is not self._source:
            end_iterator(self._source, self._items)

    def state(self) -> Any:
        """Returns what `restore` leads back to, numbers and texts in dicts and lists.

        None if nothing but reading from the start does.
        """
        if self._get is None:
            return None
        source = copy.deepcopy(self._get()) if self._moved else self._began_at
        return {"epoch": self.epoch, "source": source}

    def restore(self, state: Any) -> None:
        """Goes to where `state` was called, in this process or another."""
        self.epoch = state["epoch"]
        self._begin(state["source"])
