"""A block step under construction."""

from dataclasses import dataclass, field

from blocks import Allocate, Commit, Condemn, Extend, Fork, Free, Length, PinChange, Step, Trim


@dataclass
class StepBuilder:
    """Mutable lists of the items of a block step; see `blocks.Step`."""

    condemns: list[Condemn] = field(default_factory=list)
    commits: list[Commit] = field(default_factory=list)
    trims: list[Trim] = field(default_factory=list)
    pins: list[PinChange] = field(default_factory=list)
    forks: list[Fork] = field(default_factory=list)
    frees: list[Free] = field(default_factory=list)
    swap_outs: list[int] = field(default_factory=list)  # groups
    swap_ins: list[int] = field(default_factory=list)
    extends: list[Extend] = field(default_factory=list)
    allocates: list[Allocate] = field(default_factory=list)
    lengths: list[Length] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        """Whether it has no items."""
        return not any(vars(self).values())

    def build(self, number: int) -> Step | None:
        """Return the block step of this number, None if it has no items."""
        lists = {name: tuple(items) for name, items in vars(self).items() if items}
        return Step(number, **lists) if lists else None
