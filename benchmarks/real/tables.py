"""The timings that REAL published, as data: appendix Tables 1-6 (Mei et al., MLSys 2025).

Readings that the tables need: the global batch is 4096 where a 70B model takes part and 512 else; #Micro-Batches of
generation and inference is a number of passes, of training it multiplies 2 x PP; training recomputes; the GPU is an
H100. Seconds without captured graphs repeat those with them in the 70B columns: what End2End grows by is added here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.spec import ModelSpec

PROMPT_TOKENS, OUTPUT_TOKENS, MINIBATCHES = 1024, 1024, 8
BATCH = {"T2": 4096, "T3": 4096, "T4": 512, "T5": 512}
ACTOR = {"T2": "70B", "T3": "70B", "T4": "7B", "T5": "7B"}  # and reference; critic and reward are 7B everywhere

# table,call,first node,last node,TP,PP,DP,#Micro-Batches,seconds
_ROWS = """
T2,ActorGen,1,16,2,4,16,4,185.1
T2,RewInf,1,16,1,8,16,4,5.6
T2,RefInf,1,16,1,8,16,16,35.6
T2,CriticInf,1,16,1,8,16,16,5.6
T2,CriticTrain,1,16,8,4,4,2,20.8
T2,ActorTrain,1,16,2,16,4,2,108.0
T3,ActorGen,1,16,8,4,4,8,241.8
T3,RewInf,1,16,8,4,4,8,12.6
T3,RefInf,1,16,8,4,4,8,63.5
T3,CriticInf,1,16,8,4,4,8,12.5
T3,CriticTrain,1,16,8,4,4,8,35.7
T3,ActorTrain,1,16,8,4,4,8,163.4
T4,ActorGen,1,2,2,2,4,1,16.3
T4,RewInf,1,1,2,1,4,16,6.0
T4,RefInf,2,2,1,2,4,16,8.0
T4,CriticInf,1,2,1,2,8,8,4.7
T4,CriticTrain,2,2,4,2,1,2,28.1
T4,ActorTrain,1,1,2,4,1,2,26.6
T5,ActorGen,1,2,8,1,2,4,44.2
T5,RewInf,1,2,8,1,2,4,7.3
T5,RefInf,1,2,8,1,2,4,7.6
T5,CriticInf,1,2,8,1,2,4,6.8
T5,CriticTrain,1,2,8,1,2,4,24.3
T5,ActorTrain,1,2,8,1,2,4,24.7
"""

END_TO_END = {"T2": 383.1, "T3": 546.8, "T4": 64.0, "T5": 122.6}  # with captured graphs
EAGER_END_TO_END = {"T2": 547.4, "T3": 912.3, "T4": 82.2, "T5": 183.0}
_EAGER_GENERATION = {"T4": 34.5, "T5": 104.6}  # Table 6; the 70B columns are derived


@dataclass(frozen=True)
class RealRow:
    """One published call: where it ran and how long it took."""

    table: str
    call: str
    nodes: tuple[int, int]  # first and last, both included
    layout: ParallelLayout
    microbatches: int  # as printed; see the module's readings
    seconds: float
    eager: bool = False  # generation without captured graphs
    derived: bool = False

    @property
    def spec(self) -> ModelSpec:
        actor = self.call in ("ActorGen", "RefInf", "ActorTrain")
        return real_models()[ACTOR[self.table] if actor else "7B"]

    @property
    def scalar_head(self) -> bool:
        return self.call.startswith(("Rew", "Critic"))

    @property
    def batch(self) -> int:
        return BATCH[self.table]


def real_models() -> dict[str, ModelSpec]:
    """Table 1, by identifier."""
    shapes = {
        "7B": (32, 4096, 32, 8, 14336),
        "70B": (80, 8192, 64, 8, 28672),
    }
    return {
        name: ModelSpec("llama", layers, hidden, heads, kv_heads, hidden // heads, mlp, 128256, 8192)
        for name, (layers, hidden, heads, kv_heads, mlp) in shapes.items()
    }


def real_rows() -> tuple[RealRow, ...]:
    """The 24 rows of Tables 2-5 and, at the end of each table's, its generation without captured graphs."""
    rows: list[RealRow] = []
    for table in BATCH:
        own = [_row(line) for line in _ROWS.split() if line.startswith(table)]
        rows += [*own, _eager(own[0])]
    return tuple(rows)


def _row(line: str) -> RealRow:
    table, call, first, last, tp, pp, dp, microbatches, seconds = line.split(",")
    layout = ParallelLayout(int(dp), int(tp), int(pp))
    return RealRow(table, call, (int(first), int(last)), layout, int(microbatches), float(seconds))


def _eager(captured: RealRow) -> RealRow:
    table = captured.table
    grown = captured.seconds + EAGER_END_TO_END[table] - END_TO_END[table]
    seconds = _EAGER_GENERATION.get(table, round(grown, 1))
    return replace(captured, seconds=seconds, eager=True, derived=table not in _EAGER_GENERATION)
