"""How one task is cut over ranks: data, tensor and pipeline degrees, written d2t2p4."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Annotated

from pydantic import PlainSerializer, PlainValidator

from rlhfuse.base.errors import InputError

_LAYOUT = re.compile(r"d([1-9]\d*)t([1-9]\d*)p([1-9]\d*)(?:v([1-9]\d*))?(?:@(\d+)-(\d+))?(?::(\d+(?:,\d+)*))?")


@dataclass(frozen=True)
class ParallelLayout:
    """Data, tensor and pipeline degrees of one task, the ranks it runs on (None: all), its chunks, and its cut.

    With `chunks` v > 1 the pipeline is interleaved: it has pp * v stages and runs v times over its pp groups
    of ranks, stage s on group s % pp, so that a rank holds v stages. `cut` has the layers of each stage; without one
    they are cut evenly. Raises InputError on chunks without a pipeline and on a cut of another number of stages.
    """

    dp: int
    tp: int
    pp: int
    ranks: tuple[int, int] | None = None  # first and last rank, both included
    chunks: int = 1
    cut: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.chunks > 1 and self.pp == 1:
            raise InputError(f"layout {self}: chunks({self.chunks}) cut a pipeline, but pp is 1; drop v{self.chunks}")
        if self.cut is not None and len(self.cut) != self.stages:
            raise InputError(
                f"layout {self}: layers of {len(self.cut)} stages, but it has {self.stages}; give one each"
            )
        if self.cut is not None and not all(self.cut):
            raise InputError(f"layout {self}: a stage without layers; give each 1 or more, or use a smaller pp")

    @staticmethod
    def parse(text: str) -> ParallelLayout:
        """Inverse of `str`. Raises InputError on anything but `dDtTpP[vV][@FIRST-LAST][:LAYERS,...]`."""
        match = _LAYOUT.fullmatch(str(text).strip())
        if not match:
            raise InputError(f"layout {text!r:.80} is not of the form d1t2p4, d1t2p4v2, d1t2p4@0-7 or d1t2p4:9,9,8,6")
        dp, tp, pp, chunks = (int(match[i] or 1) for i in (1, 2, 3, 4))
        ranks = (int(match[5]), int(match[6])) if match[5] else None
        if ranks and dp * tp * pp != ranks[1] - ranks[0] + 1:
            product, count = f"dp({dp}) * tp({tp}) * pp({pp}) = {dp * tp * pp}", ranks[1] - ranks[0] + 1
            raise InputError(f"layout {text}: {product} != {count} ranks")
        return ParallelLayout(dp, tp, pp, ranks, chunks, tuple(map(int, match[7].split(","))) if match[7] else None)

    def __str__(self) -> str:
        place = f"@{self.ranks[0]}-{self.ranks[1]}" if self.ranks else ""
        chunks = f"v{self.chunks}" if self.chunks > 1 else ""
        cut = f":{','.join(map(str, self.cut))}" if self.cut else ""
        return f"d{self.dp}t{self.tp}p{self.pp}{chunks}{place}{cut}"

    @property
    def size(self) -> int:
        return self.dp * self.tp * self.pp

    @property
    def stages(self) -> int:
        """Stages of one pipeline: pp, or pp * chunks when it is interleaved."""
        return self.pp * self.chunks

    def even_cut(self, layers: int) -> tuple[int, ...]:
        """Layers of each stage where all have as many; earlier stages take the remainder."""
        base, extra = divmod(layers, self.stages)
        return tuple(base + (stage < extra) for stage in range(self.stages))

    def with_cut(self, cut: tuple[int, ...]) -> ParallelLayout:
        """This layout with so many layers on each stage; the even cut needs no mention."""
        return replace(self, cut=None if cut == self.even_cut(sum(cut)) else cut)

    def stage_layers(self, layers: int) -> tuple[range, ...]:
        """Global layer numbers of each pipeline stage of a model of `layers`."""
        ends = tuple(accumulate(self.cut or self.even_cut(layers)))
        return tuple(range(start, stop) for start, stop in zip((0, *ends), ends))


LayoutText = Annotated[ParallelLayout, PlainValidator(ParallelLayout.parse), PlainSerializer(str)]  # in JSON
