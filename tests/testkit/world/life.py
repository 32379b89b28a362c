"""One iteration of a run with a cluster, lengths, settings and mishaps that a seed draws, and what must come of it.

The code is the product's own, from `GroupSampler` down; `stand_ins` has what it uses. A life must end, give what the
serial run gives, and leave the store empty; where something fails, all ranks must end by an error that names it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import greenlet
import torch

from rlhfuse.base.errors import JointError
from rlhfuse.base.sample_ids import sample_id, sample_origin
from rlhfuse.config.settings import RunConfig
from rlhfuse.data.prompts import Prompt
from rlhfuse.fusion.inter.inference import FrozenModel, Scorer
from rlhfuse.fusion.inter.inter_stage import InterStage
from rlhfuse.fusion.inter.request import Request
from rlhfuse.monitor.heartbeat import DONE, FAILED, Heartbeat, Limits, PeerTable, ProcessName, Waiting
from rlhfuse.parallel.background import Background
from rlhfuse.run.sampling.function_reward import FunctionRewarder
from rlhfuse.run.sampling.group_sampler import GroupSampler
from rlhfuse.run.sampling.tool_caller import ToolCaller
from rlhfuse.tasks.instance_limits import InstanceLimits, SampleMoveCost
from rlhfuse.tasks.placement import Placement
from rlhfuse.tasks.role import ROLES
from testkit.world.simulation import SimulatedPlace, SimulatedStore, Simulation, clock_of
from testkit.world.stand_ins import Chat, Script, StandInEngine, StandInModel, StandInPool

LIMITS = Limits(watchdog_seconds=30.0, hang_seconds=600.0)
REWARD, TOOL, LOADER, DEATH = "reward", "tool", "loader", "death"  # mishaps


class Broken(AssertionError):
    """A life that is not as it must be."""


class Setting(SimpleNamespace):
    """What a seed has drawn. It prints whole where a life fails."""

    @staticmethod
    def draw(seed: int) -> Setting:
        rng = random.Random(seed)
        pick, chance = rng.choice, lambda part: rng.random() < part
        instances, tensor_ranks = pick((1, *[2] * 5, 3, 3, 4, 6)), pick((1, 1, 1, 2))
        wanted, copies, models, tools = pick((1, 2, 4, 6)), pick((1, 2, 2, 2, 4)), pick((0, 0, 1, 2)), chance(0.3)
        batch, mishap = wanted * copies, pick((*[""] * 8, REWARD, LOADER, DEATH, TOOL))
        turns, failing = pick((1, 2, 3)) if tools else 1, 0.2 if tools and mishap == TOOL else 0.0
        return Setting(
            seed=seed,
            instances=instances,
            tensor_ranks=tensor_ranks,
            split_workers=chance(0.3),  # a worker is one rank of an instance
            wanted=wanted,
            copies=copies,
            threshold=pick((0, 1, min(2, batch), min(3, batch), batch // 10, batch // 2, batch)),
            rows=pick((2, 4, 16, 64)),
            models=models,  # a critic, and a reward model
            early=pick((0, 1, 2)),
            signature=pick(("verl", "trl")) if models < 2 or chance(0.7) else "",  # of a reward function
            filtered=copies > 1 and chance(0.6),
            streaming=chance(0.8),
            most=pick((2, 4)),  # groups for one that is wanted
            inflight=pick((1, 2)),
            fills=chance(0.8),
            script=Script(seed, pick((2, 4, 8)), turns, pick((0.0, 0.2, 0.5, 0.9)), failing, chance(0.5)),
            tools=tools,
            step_seconds=pick((5e-3, 2e-2)),
            reward_seconds=pick((1e-3, 2e-2, 2e-1)),
            tool_seconds=pick((1e-3, 2e-2, 2e-1)),
            mishap=mishap,
            victim=rng.randrange(batch if mishap == REWARD else instances * tensor_ranks),  # a sample, or a rank
            at_wait=rng.randrange(1, 300),
            slow=pick((1.0, 1.0, 1.0, 5.0, 0.2)),  # the victim's waits, where it has no mishap
            spanned=pick([n for n in range(2, instances + 1) if not instances % n] or [1]) if chance(0.4) else 1,
            arrives=pick((0.0, 1e-3, 5e-2, 1.0)),  # seconds until the critic's weights have come from training
            lost=chance(0.5),  # where weights cannot be read, it is these
            narrow=chance(0.5),  # where a worker spans several instances: the reward model is as wide as one
        )

    @property
    def ranks(self) -> int:
        return self.instances * self.tensor_ranks

    @property
    def placement(self) -> Placement:
        t = self.tensor_ranks
        worker = self.spanned * t if self.spanned > 1 else 1 if self.split_workers else t
        cut = (tuple(tuple(range(i, i + n)) for i in range(0, self.ranks, n)) for n in (t, worker))
        return Placement(*cut)

    @property
    def config(self) -> RunConfig:
        rule = dict(max_num_gen_batches=self.most, max_inflight_gen_batches=self.inflight)
        rule |= dict(enable=self.filtered, streaming=self.streaming, on_shortage="fill" if self.fills else "error")
        turns = dict(on_tool_failure="fail" if self.script.fails else "observe", enable=self.tools, workers=1)
        reward = dict(function="f.py:f" if self.signature else "", path="m" if self.models > 1 else "", workers=1)
        sizes = dict(prompts_per_iteration=self.wanted, samples_per_prompt=self.copies, multi_turn=turns)
        return RunConfig(
            rollout=sizes,
            algorithm=dict(filter_groups=rule),
            reward=reward | dict(signature=self.signature or "auto"),
            trainer=dict(seed=self.seed),
        )


class SerialRun:
    """What a run that does one thing after another would give; written down from the definitions."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        places = range(setting.wanted * setting.most if setting.filtered else setting.wanted)
        self.samples = {place: [self._sample(place, copy) for copy in range(setting.copies)] for place in places}
        if not setting.filtered:
            self.taken = list(places)
            return
        differ = [place for place in places if len({s[6] for s in self.samples[place] if not s[3]}) > 1]
        others = [place for place in places if place not in differ]
        short = max(0, setting.wanted - len(differ))
        self.taken = sorted(differ[: setting.wanted] + others[:short])
        self.shortage = bool(short) and not setting.fills

    shortage = False

    def _sample(self, place: int, copy: int) -> tuple[Any, ...]:
        """As `facts`, with the score that counts at the end."""
        number, script, setting = sample_id(0, place, copy), self._setting.script, self._setting
        tokens, observed, failed = script.response(number)
        drawn = [i for i in range(len(tokens)) if not any(start <= i < end for start, end in observed)]
        values = tuple(float((8, *tokens)[i]) for i in drawn) if setting.models else None  # of the token before
        score = float(tokens[-1]) if setting.models > 1 else None
        told = script.score(number) if setting.signature else None
        return number, tokens, observed, failed, values, score, (told or 0.0) + (score or 0.0)

    def expected(self) -> list[tuple[Any, ...]]:
        return [sample for place in self.taken for sample in self.samples[place]]


class Life:
    """Runs a setting; `check` raises `Broken`."""

    def __init__(self, setting: Setting, folder: Path, traced: bool = False) -> None:
        self.setting, self._folder = setting, folder
        self.simulation = Simulation(setting.seed, traced)
        self._clock = clock_of(self.simulation)
        self.serial, self.config = SerialRun(setting), setting.config
        self.reports: dict[int, Any] = {}
        self.ends: dict[int, str] = {}  # rank -> the error by which it ended
        self.beats = [Heartbeat(r, ProcessName("h", f"m{r}", r, ""), 0, 0, "start") for r in range(setting.ranks)]
        self._pools: dict[int, list[Any]] = {rank: [] for rank in range(setting.ranks)}
        self._doing, self._progress = ["start"] * setting.ranks, [0] * setting.ranks
        self._engines: dict[int, Any] = {}
        self._asked_for: set[int] = set()  # samples of which the reward function was asked
        self._round, self._at_barrier = "", {}  # prefix of a round's keys -> samples finished at its barrier

    def run(self) -> None:
        simulation, setting = self.simulation, self.setting
        if setting.mishap == DEATH:
            simulation.at_wait = setting.victim, setting.at_wait
        elif not setting.mishap:
            simulation.slow[setting.victim] = setting.slow
        for rank in range(setting.ranks):
            simulation.spawn(rank, self._rank, rank)
        simulation.spawn(-1, self._watch)
        simulation.run()

    def check(self) -> None:
        setting, words, expected = self.setting, self.must_fail(), self.serial.expected()
        for rank in range(setting.ranks):
            if (end := self.ends.get(rank)) is not None or (rank in self.simulation.dead):
                if not words or (end is not None and not any(word in end for word in words)):
                    raise Broken(f"rank {rank} ended by {end!r}; it must say one of {words}")
                continue
            if words and setting.mishap != DEATH:
                raise Broken(f"rank {rank} did not end by an error that says one of {words}")
            report, _ = self.reports[rank]
            if (got := facts(report)) != [sample[:6] for sample in expected]:
                wrong = [pair for pair in zip_longest(got, (s[:6] for s in expected)) if pair[0] != pair[1]]
                raise Broken(f"rank {rank}: {len(wrong)} samples differ, the first: {wrong[0]}")
            told = {number: report.function_scores.get(number) for number, *_ in got}
            if setting.signature and told != {number: setting.script.score(number) for number, *_ in expected}:
                raise Broken(f"rank {rank} has other scores: {told}")
        if self.simulation.values and not words:
            raise Broken(f"left in the store: {[*self.simulation.values][:4]}")

    def must_fail(self) -> tuple[str, ...]:
        """All ranks must end by an error that has one of these words; empty where none may."""
        setting, simulation = self.setting, self.simulation
        shortage = ("filter_groups",) if self.serial.shortage else ()
        if setting.mishap == DEATH and setting.victim in simulation.dead:
            return f"rank {setting.victim} ", *shortage  # which may be known before anybody misses the rank
        if setting.mishap == REWARD and setting.signature and self._bad_sample() in self._asked_for:
            return (f"sample {self._bad_sample()}",)
        if setting.mishap == LOADER and setting.models and any("weights" in end for end in self.ends.values()):
            return ("weights cannot be read",)
        return shortage

    def _bad_sample(self) -> int:
        return sample_id(0, self.setting.victim // self.setting.copies, self.setting.victim % self.setting.copies)

    # ---- a rank

    def _rank(self, rank: int) -> None:
        state, because = DONE, ""
        try:
            self.reports[rank] = self._sampler(rank).run(0, self.setting.threshold, self._limits())
        except Exception as error:
            self.ends[rank] = f"{type(error).__name__}: {error}"
            if not isinstance(error, JointError):
                state, because = FAILED, str(error)
        self.simulation.note(rank, self.ends.get(rank, "done"))
        self.beats[rank] = replace(self.beats[rank], state=state, because=because)
        if self._left() <= self.simulation.dead:
            self.simulation.stop()

    def _left(self) -> set[int]:
        return {*range(self.setting.ranks)} - self.ends.keys() - self.reports.keys()

    def _say(self, rank: int, doing: str) -> None:
        self._doing[rank] = doing
        self._progress[rank] += not isinstance(doing, Waiting)
        self.simulation.note(rank, doing)

    def _sampler(self, rank: int) -> GroupSampler:
        setting, simulation, clock = self.setting, self.simulation, self._clock(rank)
        place = SimulatedPlace(simulation, rank, setting.placement, self._gathered)
        group, say = place.decoders, partial(self._say, rank)
        engine = StandInEngine(simulation, setting.script, group, setting.rows, setting.step_seconds)
        self._engines[rank] = engine
        fails = setting.mishap == LOADER and rank == setting.victim
        broken = "the critic's weights" if fails and setting.lost else ""
        arrival = Background(partial(self._arrive, broken), "weight-mover", torch.device("cpu"), clock)
        models = [
            FrozenModel(model, model, None, setting.tensor_ranks if number and setting.narrow else place.scorers.size)
            for number in range(setting.models)
            for model in [StandInModel(simulation, fails and not setting.lost, None if number else arrival)]
        ]
        scorer = Scorer(dict(zip(ROLES[2:], models)), 100, 1.0, torch.device("cpu"), clock=clock)
        prompts = [Prompt((7, 8), {}) for _ in range(setting.wanted * setting.most)]
        tools = SimpleNamespace(tools=SimpleNamespace(environment=None, digest="", fault=lambda *_: ""), turns=Chat())
        tokenizer = SimpleNamespace(decode=lambda *_, **__: "")
        inputs = SimpleNamespace(
            config=self.config, tokenizer=tokenizer, tools=tools if setting.tools else None, prompts=prompts
        )
        rewarder = caller = None

        def pool(seconds: float, value: Any, *_: Any) -> StandInPool:
            self._pools[rank].append(made := StandInPool(simulation, seconds, value))
            return made

        if setting.tools:
            calls = partial(pool, setting.tool_seconds, self._answer)
            caller = ToolCaller(self.config, tools, rank, self._folder, group.is_leader, None, clock, calls)
        if setting.signature and group.is_leader:
            calls = partial(pool, setting.reward_seconds, self._scored)
            rewarder = FunctionRewarder(inputs, say, caller, clock, calls)
        stage = InterStage(
            place=place,
            engine=engine,
            scorer=scorer,
            store=SimulatedStore(simulation, self._law),
            timeout_seconds=60.0,
            progress=say,
            bucket_bytes=1,
            early_models=setting.early,
            rewarder=rewarder,
            tools=caller,
            clock=clock,
        )
        return GroupSampler(inputs, stage, rewarder, caller, self._requests, engine.resume)

    def _arrive(self, broken: str) -> None:
        self.simulation.pause(self.simulation.delay(self.setting.arrives))
        if broken:
            raise OSError(f"{broken}: weights cannot be read")

    def _requests(self, iteration: int, prompts: Sequence[Prompt], first: int) -> list[Request]:
        copies = range(self.setting.copies)
        return [
            Request(sample_id(iteration, first + i, copy), prompt.tokens, None)
            for i, prompt in enumerate(prompts)
            for copy in copies
        ]

    def _limits(self) -> InstanceLimits:
        moves = SampleMoveCost(1.0, 1e-4, 1e-9, 1e-5)
        return InstanceLimits(
            4, 1000.0, 1.0, 4, 4, 5, 5, 64, instances_per_worker=self.setting.spanned, move_cost=moves
        )

    def _answer(self, call: Any) -> tuple[Any, str]:
        text, error = self.setting.script.answer(call.sample_id, call.number)
        return (None, text), error

    def _scored(self, call: Any) -> tuple[Any, str]:
        self._asked_for.update(call.sample_ids)
        if self.setting.signature == "trl":  # all samples of a prompt, in their order, each with what tools said
            iteration, place, _ = sample_origin(call.sample_ids[0])
            assert call.sample_ids == tuple(sample_id(iteration, place, i) for i in range(self.setting.copies)), call
            for sample, said in zip(call.sample_ids, call.turns):
                script = self.setting.script
                answers = [text or error for text, error in map(partial(script.answer, sample), range(len(said)))]
                assert said == answers and len(said) >= len(script.response(sample)[1]), call
        if self.setting.mishap == REWARD and self._bad_sample() in call.sample_ids:
            return None, f"sample {self._bad_sample()}: the function raised"
        return {number: self.setting.script.score(number) for number in call.sample_ids}, ""

    def _gathered(self, everyone: list[Any]) -> None:
        if len(everyone[0]) == 4:  # the barrier
            self._at_barrier[self._round] = sum(len(began) - len(states) for states, _, _, began in everyone)

    def _law(self, key: str) -> None:
        """Who reads that a sample of the tail is finished finds it published."""
        self._round, _, name = key.rpartition("/")
        if name == "tickets" and (busy := self._decoding_beside(greenlet.getcurrent().task.rank)):
            raise Broken(f"a worker takes work while its ranks {busy} decode")
        if name == "finished" and self._round in self._at_barrier:
            keys = (f"{self._round}/{word}" for word in ("finished", "published"))
            finished, published = (int(self.simulation.values.get(key, 0)) for key in keys)
            if finished - self._at_barrier[self._round] > published:
                raise Broken(f"{finished} samples are finished, {published} published")

    def _decoding_beside(self, rank: int) -> list[int]:
        """Leaders of the instances under the worker of `rank` that still decode; tensor ranks may be a step behind."""
        placement = self.setting.placement
        under = placement.instances_under(placement.worker_of(rank))
        leaders = [placement.instances[one][0] for one in under if len(under) > 1]
        return [one for one in leaders if self._engines[one].has_unfinished()]

    # ---- the watchdog

    def _watch(self) -> None:
        """End all ranks as their watchdogs would, by the verdict of one that is left."""
        tables: dict[int, PeerTable] = {}
        for counter in range(1, 10_000):
            self.simulation.pause(1.0)
            now, dead = self.simulation.now, self.simulation.dead
            if not (left := self._left() - dead):
                break
            for rank in {*range(self.setting.ranks)} - dead:
                beat = self.beats[rank].now_in(self._doing[rank])
                calls = sum(pool.under_way() for pool in self._pools[rank])
                self.beats[rank] = replace(beat, counter=counter, progress=self._progress[rank], calls=calls)
            for rank in left:
                table = tables.setdefault(rank, PeerTable(self.beats[rank], LIMITS, now, self.setting.ranks))
                table.note_own(self.beats[rank], now)
                for other in self.beats:
                    if other.rank != rank:
                        table.note(other, now)
                if verdict := table.verdict(now):
                    self.ends |= dict.fromkeys(self._left(), verdict.report)
                    self.simulation.stop()
                    return
        self.simulation.stop()


def facts(report: Any) -> list[tuple[Any, ...]]:
    """What a run is about, of each sample: its id, tokens and runs of observed ones, failure, values and score."""
    return [
        (
            r.sample_id,
            r.response_tokens,
            r.observed,
            r.failed,
            None if r.values is None else tuple(r.values.tolist()),
            r.score,
        )
        for r in report.rollouts
    ]


def live(seed: int, folder: Path) -> Life:
    """One whole life. Raises `Broken` with the setting and the last events of every rank."""
    setting = Setting.draw(seed)
    life = Life(setting, folder)
    try:
        life.run()
        life.check()
    except Exception as error:
        again = Life(setting, folder, traced=True)
        with suppress(Exception):
            again.run()
        lines = [f"  rank {rank}: {line}" for rank, trace in sorted(again.simulation.trace.items()) for line in trace]
        raise Broken("\n".join((f"seed {seed}: {type(error).__name__}: {error}", str(setting), *lines))) from error
    return life
