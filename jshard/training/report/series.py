"""The values of a metric over steps, in bounded memory however long the run is."""

from typing import TypeAlias

Points: TypeAlias = list[tuple[int, float]]  # (step, value)

_MOST = 2048  # groups; a chart shows fewer points


class Series:
    """Values in groups of neighbours, with the mean and the last of each.

    A group is one value at first. Whenever there are too many, each two become one.

    Attributes:
      count: The number of values.
      total: Their sum.
      group: The number of values in a group.
    """

    def __init__(self) -> None:
        self.count, self.total, self.group = 0, 0.0, 1
        self._groups: list[tuple[int, float, float]] = []  # last step, value; mean
        self._in_last = 0  # values in the last group, which may be incomplete

    def add(self, step: int, value: float) -> None:
        """Adds the value of a step."""
        self.count += 1
        self.total += value
        if self._in_last % self.group == 0:
            if len(self._groups) == _MOST:
                self._halve()
            self._groups.append((step, value, float(value)))
            self._in_last = 1
            return
        _, _, mean = self._groups[-1]
        self._in_last += 1
        share = 1 / self._in_last
        self._groups[-1] = (step, value, mean * (1 - share) + value * share)

    def _halve(self) -> None:
        pairs = zip(self._groups[::2], self._groups[1::2], strict=True)
        self._groups = [
            (step, value, one / 2 + other / 2)
            for (_, _, one), (step, value, other) in pairs
        ]
        self.group *= 2

    @property
    def means(self) -> Points:
        """The mean of each group, at its last step."""
        return [(step, mean) for step, _, mean in self._groups]

    @property
    def samples(self) -> Points:
        """The last value of each group."""
        return [(step, value) for step, value, _ in self._groups]
