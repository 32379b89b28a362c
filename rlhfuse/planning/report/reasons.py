"""Sentences beside a plan's numbers: why they are so, and the files that the run will write."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter

from rlhfuse.base.readable_bytes import readable_bytes
from rlhfuse.config.settings import RunConfig
from rlhfuse.config.spec import GPU, HardwareSpec
from rlhfuse.config.values import AUTO
from rlhfuse.costs.forms.training import MicrobatchTokens
from rlhfuse.costs.table import CostTable
from rlhfuse.decisions.batch_arithmetic import BatchArithmetic
from rlhfuse.planning.candidate import Candidate
from rlhfuse.planning.job import Job
from rlhfuse.planning.memory.instance_cache import InstanceCache
from rlhfuse.planning.memory.memory_budget import MemoryBudget
from rlhfuse.planning.planned_lengths import PlannedLengths
from rlhfuse.planning.training.training_problem import equal_microbatch
from rlhfuse.tasks.instance_limits import InstanceLimits
from rlhfuse.tasks.role import POLICY

SMALL_WEIGHTS = 100_000_000  # below this the default learning rate shows nothing for hundreds of iterations
UNTIL_THEN = (  # without R_t
    "until then iterations are serial; with parallel.lengths=FILE[:COLUMN] of past responses, or with "
    "fusion.threshold_file (tools/calibrate_threshold.py), the run begins fused"
)
CHECKPOINT_BYTES = 12  # per parameter that trains: float32 weight and Adam's two moments


@dataclass(frozen=True)
class Reasons:
    """Why a plan of `run` is as it is."""

    run: Job

    @property
    def config(self) -> RunConfig:
        return self.run.config

    def choices(self, batch: BatchArithmetic, cache: InstanceCache) -> Iterator[str]:
        """A line for every value of the configuration that was left to be chosen: what it is, and from what."""
        asked, config, specs = self.run.given, self.run.config, self.run.specs
        if asked.data.max_prompt_tokens == AUTO:
            role, context = min(((role, spec.context) for role, spec in specs.items()), key=itemgetter(1))
            response = config.rollout.max_response_tokens
            room = f"context({context}) of {role} - rollout.max_response_tokens({response}) = {context - response}"
            yield f"data.max_prompt_tokens = {config.data.max_prompt_tokens}: the longest prompt; at most {room}"
        if asked.algorithm.minibatches == AUTO:
            parts = f"{batch.samples} samples evenly, into {batch.samples_per_minibatch} each"
            yield f"algorithm.minibatches = {batch.minibatches} (4 where possible): they cut {parts}"
        if cache.left:
            cause = "what memory leaves in generation; not every sample of an instance finds room at full length"
            yield f"rollout.kv_blocks_per_instance = {cache.left}: {cause}"
        if asked.reward.signature == AUTO != config.reward.signature:
            yield f"reward.signature = {config.reward.signature}: by the names of the function's parameters"

    def ends(self) -> str:
        """What ends a response: tokens by their ids, texts, a length."""
        rollout = self.config.rollout
        tokens = (*(() if rollout.ignore_eos else self.run.specs[POLICY].eos_token_ids), *rollout.stop_token_ids)
        parts = [f"at token {' or '.join(map(str, dict.fromkeys(tokens)))}"] if tokens else []
        if not tokens and not rollout.ignore_eos:
            parts = ["at the tokenizer's end token, as the model's files name none"]
        parts += [f"with the text {text!r}" for text in rollout.stop]
        least = f" (of {rollout.min_tokens} tokens or more)" if rollout.min_tokens else ""
        return f"a response{least} ends {', '.join((*parts, f'after {rollout.max_response_tokens} tokens'))}"

    def source_of_costs(self, hardware: HardwareSpec, costs: CostTable, costs_name: str) -> str:
        """The source of the times."""
        if pace := self.config.trainer.pace:
            return (
                f"times are those of trainer.pace={pace} x {self.config.trainer.pace_stretch:g}, which work waits for"
            )
        if self.config.fusion.profile:
            training = "training too" if costs.training is not None else "training analytically"
            link = ""
            if self.run.world_size > hardware.devices_per_node:
                link = (
                    f"; {hardware.cross_link_bandwidth / 1e6:.4g} MB/s between machines, at most what it has measured"
                )
            return f"generation and inference are priced by {costs_name}, {training}{link}"
        if hardware.source:
            return (
                f"hardware: {self.config.trainer.hardware} ({hardware.source}): times are a roofline with "
                f"{', '.join(hardware.measured)} as measured there, the rest assumed; fusion.profile takes what "
                "tools/profile_costs.py measures of these models"
            )
        unsure = self.config.trainer.hardware == "auto" and hardware.device is GPU
        assumed = " (trainer.hardware=auto: assumed)" if unsure else ""
        mixed = "," in hardware.name
        rates = f"worst rates of {hardware.name}" if mixed else f"rates of a {hardware.name}"
        return (
            f"times are a roofline with the {rates}{assumed}; nothing was measured here: set "
            "fusion.profile to a past run's costs.json, or to what tools/profile_costs.py measures"
        )

    def reward_calls(self, costs: CostTable) -> tuple[str, ...]:
        """What a call of the reward function counts, where there is one."""
        if not self.config.reward.function:
            return ()
        if call := costs.reward:
            at_once = self.config.reward.workers * call.at_once
            return (f"a call of reward.function counts {call.seconds:.3g} s, {at_once} at once",)
        return ("what a call of reward.function takes is unknown: it counts nothing until the run has measured it",)

    def drawn_again(self, lengths: PlannedLengths) -> Iterator[str]:
        """How many groups generation is priced for, where they are filtered."""
        if not self.config.algorithm.filter_groups.enable:
            return
        key, source = "algorithm.filter_groups", self.config.parallel.lengths
        if lengths.begun == 1:
            past = "parallel.lengths=RUN, the folder of a past run with this setting, says how many are drawn again"
            yield f"{key}: generation is priced as if the scores of all groups differed; {past}"
        else:
            yield f"{key}: generation is priced for {lengths.begun:.3g} groups begun for one that is taken, by {source}"

    def left_out(self, lengths: PlannedLengths) -> Iterator[str]:
        """What training is priced without, where it leaves out samples that have no gradient."""
        if not self.config.algorithm.skips:
            return
        key, source = "algorithm.skip_zero_gradients", self.config.parallel.lengths
        if not lengths.trained:
            past = "parallel.lengths=RUN, the folder of a past run with this setting, says how many"
            yield f"{key}: it is not known how many samples have none, and training is priced with all; {past}"
            return
        samples, tokens = (1 - share for share in lengths.trained_shares)
        where = f"the last iterations of {source or 'the run'}"
        left_out = f"{samples:.1%} of the samples, {tokens:.1%} of the tokens, have none, by {where}"
        yield f"{key}: training is priced without these: {left_out}"

    def instance_limits(self, limits: InstanceLimits) -> str:
        """Bounds of the samples that go on decoding on one instance."""
        source = "fusion.bs_max" if self.config.fusion.bs_max else "a decode step is within 10% of one sample's"
        share = limits.active_share
        pauses = f"; samples decode {share:.0%} of their time, so that so many more share both" if share < 1 else ""
        return (
            f"an instance keeps at most BS_max = {limits.bs_max} samples then ({source}), and what its KV cache holds: "
            f"one takes up to M = {readable_bytes(limits.sample_kv_bytes)} of "
            f"C = {readable_bytes(limits.kv_capacity_bytes)}{pauses}"
        )

    def learning_rates(self) -> Iterator[str]:
        """A line for each small model that trains at the default rate, which is one for billions of weights."""
        for role in self.config.trained():
            spec, optim = self.run.specs[role], getattr(self.config, role).optim
            weights = spec.parameters(scalar_head=role.scalar_head)
            if optim.lr == getattr(RunConfig(), role).optim.lr and optim.name != "sgd" and weights < SMALL_WEIGHTS:
                yield (
                    f"{role}.optim.lr = {optim.lr:g} is the default, for billions of weights: one of "
                    f"{weights / 1e6:.3g} million hardly moves at it; 1e-4 is usual for so few"
                )

    def offload(self, memory: MemoryBudget, seen_seconds: float) -> Iterator[str]:
        """Where the optimizer is outside training, and what that costs; nothing on a CPU that was not asked for it."""
        asked, offload = f"trainer.offload_optimizer={self.config.trainer.offload_optimizer}", memory.offload
        if offload:
            why = f"{asked}: on" if asked.endswith("true") else f"{asked}: a phase would not fit beside it, on"
            until = "before the weights move" if offload.first_phase == "moves" else "while the weights move"
            yield (
                f"{why} the host outside training rest {readable_bytes(offload.nbytes)} of optimizer per rank; they "
                f"leave {until} and come back during the first mini-batch, {offload.seconds:.2g} s each way, of which "
                f"{seen_seconds:.2g} s are not hidden"
            )
        elif memory.hardware.device.own_memory:
            yield f"{asked}: the optimizer stays on the device" + (
                ", every phase fits beside it" if asked.endswith("auto") else ""
            )

    def early_loading(self, memory: MemoryBudget, costs: CostTable) -> Iterator[str]:
        """On GPUs, which models that score are loaded before generation ends."""
        scorers = self.config.scorers()
        if not memory.hardware.device.own_memory or not scorers:
            return
        early, seconds = scorers[: len(memory.early)], costs.swap_in
        loading = f"loading {', '.join(scorers)} takes {seconds:.2g} s of an instance"
        if not early:
            most = f"{memory.keeping_cap / memory.limit:.0%} of the limit"
            yield f"{loading}, after generation: beside it not even {scorers[0]} has room in {most}"
        else:
            rest = f"; {', '.join(scorers[len(early) :])} after it, for want of room" if early != scorers else ""
            held = readable_bytes(sum(memory.early))
            yield f"{loading}: {', '.join(early)} ({held}) beneath the end of generation{rest}"

    def output_files(self) -> tuple[tuple[str, str], ...]:
        """Names within the run directory, which comes first, each with what it is."""
        trainer, trained = self.config.trainer, self.config.trained()
        counts = {role: self.run.specs[role].parameters(scalar_head=role.scalar_head) for role in trained}
        loggers = [
            name for name, on in (("tensorboard/", trainer.tensorboard), ("wandb/", trainer.wandb != "off")) if on
        ]
        traced = trainer.trace_iterations
        rows = [
            (trainer.output_dir or "runs/<config name>-<time>", "the run directory; it holds"),
            ("config.yaml", "this configuration, defaults filled in"),
            ("plan.json, schedule.json", "this plan, and the training schedule"),
            ("metrics.jsonl", f"one line for each of {trainer.iterations} iterations"),
            *((name, "the same metrics") for name in loggers),
            ("trace.json", f"time line of the last {traced} iterations"),
            ("samples.jsonl", f"{trainer.sample_texts} samples of each iteration as text"),
            ("costs.json", "what work cost in this run, for fusion.profile of a later one"),
        ]
        when = [f"every {trainer.save_every} iterations"] if trainer.save_every else []
        when += ["where the held-out score is the best so far"] if trainer.keep_best else []
        if when:
            size = readable_bytes(CHECKPOINT_BYTES * sum(counts.values()))
            kept = f"the last {trainer.keep_checkpoints}{' and the best' if trainer.keep_best else ''} are kept"
            rows.append(("checkpoints/iteration-N/", f"{' and '.join(when)}, {size} each; {kept}"))
        else:
            remedy = "a run that dies begins again; trainer.save_every=N saves one every N iterations"
            rows.append(("(no checkpoints)", remedy))
        if trainer.export and trainer.iterations:
            rows += [
                (
                    f"export/{best}{role}/",
                    f"{readable_bytes(count * trainer.element_bytes)}, in Hugging Face layout, at the end",
                )
                for best in ("", *(("best/",) if trainer.keep_best else ()))
                for role, count in counts.items()
            ]
        return (*rows, ("finished.json", "when all iterations are done"))


def host_limits(draft: Candidate) -> tuple[str, ...]:
    """The tasks that a GPU's host limits, and from how many tokens of a forward on it no longer does."""
    if draft.inputs.measured or not draft.inputs.hardware.device.own_memory:
        return ()
    told: dict[str, list[str]] = defaultdict(list)
    micro_of = partial(equal_microbatch, draft.inputs.drawn, draft.batch, draft.training.likeliest)
    usual, rollout = micro_of(draft.ranks.shape.shares[0]), draft.run.config.rollout
    for task in draft.tasks:
        cost, ways = draft.analytic[task.name], 2 if task.training else 1
        host = sum(cost.host_seconds) / cost.spec.layers if task.training else cost.hardware.launch_seconds

        def hidden(tokens: int) -> bool:
            micro = MicrobatchTokens(tokens, tokens / usual.tokens * usual.sequences, 0)
            return sum(cost.stage_seconds(micro).layer[:ways]) >= host  # noqa: B023

        if task.name != "generation" and (least := bisect_left(range(1 << 20), True, key=hidden)):
            pack = rollout.max_batched_tokens * cost.layout.tp / draft.analytic["generation"].layout.tp
            has = micro_of(draft.ranks.shape.share(task.role)).tokens if task.training else pack
            told[f"{least:,} (has {has:,.0f}{': launch-bound' if has < least else ''})"].append(task.name)
    every = "; ".join(f"{', '.join(names)} {tokens}" for tokens, names in told.items())
    return (f"host: kernel launches are the bottleneck of forwards with fewer tokens than: {every}",) if told else ()


def of_keeping(memory: MemoryBudget, activations: Sequence[float]) -> tuple[str, ...]:
    """On GPUs, whether what generation needs stays on the device; `memory`: of a run that releases it."""
    if not memory.hardware.device.own_memory:
        return ()
    held, graphs = readable_bytes(memory.generation.device), memory.generation.graphs
    if memory.keeps_generation(activations):
        recorded = ", graphs are recorded once" if graphs else ""
        return (f"kept: the weights and cache of generation stay on the device between iterations ({held}){recorded}",)
    kept, needed, most = memory.with_generation_kept(), memory.keeping_bytes(activations), memory.keeping_cap
    recorded = ", graphs are recorded in each iteration" if graphs else ""
    if memory.offload:
        return (f"released after generation, for the optimizer too leaves the device{recorded}",)
    left = memory.generation.kv - (needed - most)  # of the cache, if nothing else goes
    smaller = f"; a cache of {readable_bytes(left)} (rollout.kv_blocks_per_instance) would let them stay"
    return (
        f"released after generation: with its weights and cache ({held}) {kept.fullest(activations).phase} would need "
        f"{readable_bytes(needed)} of {readable_bytes(most)}, {most / memory.limit:.0%} of the limit{recorded}"
        + (smaller if left > 0 else ""),
    )
