"""The timings that REAL published, as data: appendix Tables 1-6 (Mei et al., MLSys 2025); each beside its prediction.

Readings that the tables need: the global batch is 4096 where a 70B model takes part and 512 else; #Micro-Batches of
generation and inference is a number of passes, of training it multiplies 2 x PP; training recomputes; the GPU is an
H100. Seconds without captured graphs repeat those with them in the 70B columns: what End2End grows by is added here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from paper.call_graph import GraphCall, graph_seconds
from paper.calls import CallWork, ModelCall
from paper.llamas import llama
from paper.space import INFERENCES, SOURCES

from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.costs.hardware import ASSUMED, Calibration, data_sheets
from rlhfuse.costs.kernels import Kernels

PROMPT_TOKENS, OUTPUT_TOKENS, MINIBATCHES, VOCABULARY = 1024, 1024, 8, 128256
BATCH = {"T2": 4096, "T3": 4096, "T4": 512, "T5": 512}
SMALL = "Llama 3 8B"  # Table 1's 7B: critic and reward everywhere
ACTOR = {"T2": "70B", "T3": "70B", "T4": SMALL, "T5": SMALL}  # and reference

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
class RealCalibration(Calibration):
    """A calibration of an engine that can also launch a decode step kernel by kernel."""

    eager_decode_layer_seconds: float = 0.7e-3  # added to a layer's decode step there; assumed

    def eager(self) -> RealCalibration:
        """The same without captured graphs."""
        return replace(self, decode_layer_seconds=self.eager_decode_layer_seconds)


ASSUMED_REAL = RealCalibration(**asdict(ASSUMED))

# The fit of benchmarks/real_tables.py to the 28 rows of REAL's appendix, an H100 cluster under an eager engine of 2024
# that asks every worker over the network: `fit_calibration(real_rows(), "real-h100")`. Its floors and its share of
# links were fitted without a start-up of collectives, which they hold.
REAL_H100 = RealCalibration(
    name="real-h100",
    gemm=0.5666,
    hbm=1.0,
    node_link=0.3035,
    cross_link=0.8,
    host=0.8,
    forward_layer_seconds=0.9655e-3,
    decode_layer_seconds=0.2412e-3,
    eager_decode_layer_seconds=0.7554e-3,
    call_seconds=2.056,
)


@dataclass(frozen=True)
class RealRow:
    """One published call: where it ran and how long it took. Its micro-batches are as printed."""

    table: str
    work: CallWork
    nodes: tuple[int, int]  # first and last, both included
    layout: ParallelLayout
    seconds: float
    eager: bool = False  # generation without captured graphs
    derived: bool = False

    @staticmethod
    def parse(line: str) -> RealRow:
        table, name, first, last, tp, pp, dp, microbatches, seconds = line.split(",")
        spec = llama(ACTOR[table] if name in ("ActorGen", "RefInf", "ActorTrain") else SMALL, VOCABULARY)
        sizes = BATCH[table], PROMPT_TOKENS, OUTPUT_TOKENS, MINIBATCHES, int(microbatches)
        layout = ParallelLayout(int(dp), int(tp), int(pp))
        return RealRow(table, CallWork(name, spec, *sizes), (int(first), int(last)), layout, float(seconds))

    def without_graphs(self) -> RealRow:
        grown = round(self.seconds + EAGER_END_TO_END[self.table] - END_TO_END[self.table], 1)
        seconds = _EAGER_GENERATION.get(self.table, grown)
        return replace(self, seconds=seconds, eager=True, derived=self.table not in _EAGER_GENERATION)

    def call(self, calibration: RealCalibration, kernels: Kernels | None = None) -> ModelCall:
        """The model in its layout on H100s."""
        reached = calibration.eager() if self.eager else calibration
        return self.work.on(self.layout, reached.reached(data_sheets()["h100"]), kernels)

    def predicted_seconds(self, calibration: RealCalibration, kernels: Kernels | None = None) -> float:
        """What the cost model says about the call."""
        return self.work.seconds(self.call(calibration, kernels))


def real_rows() -> tuple[RealRow, ...]:
    """The 24 rows of Tables 2-5 and, at the end of each table's, its generation without captured graphs."""
    rows: list[RealRow] = []
    for table in BATCH:
        own = [RealRow.parse(line) for line in _ROWS.split() if line.startswith(table)]
        rows += [*own, own[0].without_graphs()]
    return tuple(rows)


def of_table(rows: Sequence[RealRow], table: str) -> list[RealRow]:
    return [row for row in rows if row.table == table]


def end_to_end_seconds(rows: Sequence[RealRow], calibration: RealCalibration, eager: bool = False) -> float:
    """One iteration of a table, its calls placed by Algorithm 1, weights moved where a model changes its layout."""
    chosen = {row.work.name: row for row in rows if row.work.name != "ActorGen" or row.eager == eager}
    calls = []
    for name in ("ActorGen", *INFERENCES, "CriticTrain", "ActorTrain"):
        row, seconds = chosen[name], chosen[name].predicted_seconds(calibration)
        if name in SOURCES and row.layout != chosen[SOURCES[name]].layout:
            seconds += row.call(calibration).weights_seconds()
        parents = {"Gen": (), "Inf": ("ActorGen",)}.get(name[-3:], INFERENCES)
        calls.append(GraphCall(name, row.nodes, seconds, parents))
    return graph_seconds(calls)
