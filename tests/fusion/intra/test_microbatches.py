"""Micro-batches: what is known before the program runs, when they are cut, and the memory they are sent from."""

import math
import re

import pytest
import torch
import torch.distributed as dist
from testkit.tiny import write_checkpoint
from testkit.training_pair import make_batch, unit_problem
from torch.testing._internal.distributed.fake_pg import FakeStore

from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.algorithm import AlgorithmConfig
from rlhfuse.config.settings import ParallelConfig, RunConfig
from rlhfuse.config.spec import ModelSpec
from rlhfuse.decisions.layouts import given_tasks
from rlhfuse.fusion.intra.microbatches import Microbatch, Microbatches
from rlhfuse.fusion.intra.training_step import TrainingStep
from rlhfuse.models import stage
from rlhfuse.models.stage import Outbox
from rlhfuse.parallel.device import Device
from rlhfuse.run.rank_models import ModelFolders, build_models
from rlhfuse.schedule.ir.ranks import rank_map
from rlhfuse.schedule.program.lowering import lower
from rlhfuse.schedule.rules.builders import serial_1f1b
from rlhfuse.tasks.microbatch_cut import MicrobatchCut

SCORING = ("reference_inference", "reward_inference", "critic_inference")
CPU, META = torch.device("cpu"), torch.device("meta")


def test_a_micro_batch_is_cut_when_the_program_comes_to_it(tmp_path, monkeypatch):
    """One rank trains both models: whatever the host does not have to do first is left until a stage computes."""
    spec = ModelSpec.from_config(write_checkpoint(tmp_path / "model", num_hidden_layers=1))
    layouts = {role: ParallelLayout(1, 1, 1) for role in ("actor", "critic")}
    ranks, schedule, log = rank_map(layouts), serial_1f1b(unit_problem(layouts, 4)), []
    monkeypatch.setattr(
        Microbatch, "of", lambda *given, real=Microbatch.of, **named: (log.append("cut"), real(*given, **named))[1]
    )
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    try:
        tasks = ("actor_train", "critic_train", "generation", "inference", *SCORING)
        config = RunConfig(parallel=ParallelConfig(**dict.fromkeys(tasks, "d1t1p1")))
        config = config.with_(trainer={"dtype": "float32"}, actor={"optim": {"lr": 1e-3}})
        folders = ModelFolders({}, dict.fromkeys(("actor", "critic", "reference", "reward"), spec))
        tasks = given_tasks(config.parallel, config.roles(), 1)
        models = build_models(config, tasks, folders, ranks, 0, Device(CPU, "fake"))
        for model in models.trained.values():
            for weight in model.optimizer.module.parameters():
                torch.nn.init.normal_(weight, 0.0, 0.02)
        family = MicrobatchCut(1, (4,), math.inf), {4: schedule}, {4: lower(schedule, ranks)}
        step = TrainingStep(0, ranks, *family, models.trained, models.channels, 1.0, log.append)
        step.run(make_batch(5), dict.fromkeys(layouts, 1e-3), AlgorithmConfig())
    finally:
        dist.destroy_process_group()
    instructions = [text for text in log if text != "cut"]
    assert log.count("cut") == 8 and len(instructions) > 16
    for place, text in enumerate(log):
        if text == "cut":  # right behind the forward that wants it has begun
            assert re.search(r":0F\d$", log[place - 1]), log[place - 1]


def test_a_micro_batch_holds_the_tokens_that_count():
    batch = make_batch(5)
    batch = batch.with_fields(counted=torch.arange(batch.response_tokens) % 3 > 0).counting(torch.arange(20) % 4 > 0)
    cut, samples = Microbatches(batch, [[4, 7, 2]], CPU, 1, Outbox())[0], batch.select([4, 7, 2])
    kept = samples.counted
    assert cut.lengths.tolist() == samples.counted_lengths.tolist() and int(cut.lengths[0]) == 0 < int(cut.lengths[1])
    assert torch.equal(cut.predictions, samples.prediction_index[kept]) and len(cut.packed) >= len(samples.tokens)
    assert torch.equal(cut.targets, samples.tokens[samples.response_index[kept]])
    assert torch.equal(cut.samples.advantages, samples.advantages[kept])


@pytest.mark.parametrize("shards", [1, 4])
def test_all_that_a_step_sends_fits_into_what_was_taken_before_it(monkeypatch, shards):
    taken = []
    locked = lambda size: taken.append(size) or torch.empty(size, dtype=torch.uint8)  # noqa: E731
    monkeypatch.setattr(stage, "page_locked", locked)
    outbox = Outbox()
    for seed in (5, 6):
        batch = make_batch(seed)
        parts = [list(range(start, start + 5)) for start in range(0, 20, 5)]
        cuts = Microbatches(batch, parts, META, shards, outbox)
        outbox.empty(sum(cuts._bytes(number) for number in range(4)))
        arrived, real = [], torch.Tensor.to

        def to(flat, where, **named):
            return real(flat, where, **named) if isinstance(where, torch.dtype) else arrived.append(flat) or flat

        monkeypatch.setattr(torch.Tensor, "to", to)
        for number, part in enumerate(parts):
            cut, samples = cuts[number], batch.select(part)
            assert cuts.rows[number] == len(cut.packed) and cuts[number] is cut
            assert torch.equal(cut.targets, samples.tokens[samples.response_index])
            assert torch.equal(cut.packed.tokens[: len(samples.tokens)], samples.tokens)
            assert torch.equal(cut.samples.advantages, samples.advantages)
        monkeypatch.undo()
        monkeypatch.setattr(stage, "page_locked", locked)
        inside = outbox._memory.untyped_storage().data_ptr()
        assert all(flat.untyped_storage().data_ptr() == inside for flat in arrived) and len(arrived) == 12
        assert outbox._taken <= outbox._memory.nbytes
    assert len(taken) in (1, 2)
