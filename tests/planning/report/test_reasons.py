"""What a plan gives as its reasons: models that may be too small for their rates, files that the run writes."""

import json
import re

from testkit.four_ranks import SPECS, drafted, planned, run, shared_plan

from rlhfuse.base.readable_bytes import readable_bytes
from rlhfuse.config.spec import ModelSpec
from rlhfuse.costs.forms.training import MicrobatchTokens
from rlhfuse.planning.job import Job
from rlhfuse.planning.planner import make_plan
from rlhfuse.planning.report.reasons import Reasons, host_limits
from rlhfuse.planning.report.report import PlanReport
from rlhfuse.planning.settle import settle
from rlhfuse.planning.training.training_problem import equal_microbatch


def reasons_of(config, specs=SPECS) -> Reasons:
    return Reasons(settle(Job(config, specs, 4)))


def test_small_models_at_the_rate_of_large_ones_are_named():
    said = [reason for reason in PlanReport.of(shared_plan()).reasons if ".optim.lr" in reason]
    assert [reason.split()[0] for reason in said] == ["actor.optim.lr", "critic.optim.lr"]
    set_ = run(actor__optim={"lr": 1e-4}, critic__optim={"name": "sgd"})
    assert not any(".optim.lr" in reason for reason in PlanReport.of(planned(set_)).reasons)
    large = ModelSpec("llama", 32, 1024, 8, 8, 128, 4096, 512, 512)
    assert list(reasons_of(run(), dict.fromkeys(SPECS, large)).learning_rates()) == []


def test_a_plan_says_what_training_leaves_out_and_does_not_price_it(tmp_path):
    """Half of the samples of a past run, which had four fifths of the tokens."""
    row = {"lengths/prompt": [10] * 8, "lengths/output": [150, 30] * 4, "lengths/zero_gradient": [1, 0] * 4}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    grpo = {"algorithm__name": "grpo", "algorithm__kl_coef": 0, "parallel__lengths": str(tmp_path)}
    kinds = {"on": {"algorithm__skip_zero_gradients": True}, "off": {}}
    kinds["not known"] = kinds["on"] | {"parallel__lengths": ""}
    plans = {kind: PlanReport.of(planned(run(**grpo | keys))) for kind, keys in kinds.items()}
    said = {kind: [reason for reason in plan.reasons if "skip_zero" in reason] for kind, plan in plans.items()}
    assert said["off"] == []
    assert said["on"] == [
        "algorithm.skip_zero_gradients: training is priced without these: 50.0% of the samples, 80.0% of the tokens, "
        f"have none, by the last iterations of {tmp_path}"
    ]
    assert len(said["not known"]) == 1 and "training is priced with all; parallel.lengths=RUN" in said["not known"][0]
    on, off = plans["on"], plans["off"]
    assert on.schedule.makespan_seconds < 0.8 * off.schedule.makespan_seconds
    assert on.seconds.generation_fused == off.seconds.generation_fused and on.batch == off.batch


def files(**trainer):
    config = run().with_(data={"val_files": ("held_out.jsonl",)}, trainer={"iterations": 5} | trainer)
    return dict(reasons_of(config).output_files())


def test_a_plan_says_where_the_host_of_a_gpu_is_the_limit_and_from_how_many_tokens_on_it_is_not():
    layouts = dict(parallel__actor_train="d1t1p4", parallel__critic_train="d1t1p4", parallel__generation="d4t1p1")
    wide = dict.fromkeys(SPECS, ModelSpec("llama", 8, 1024, 8, 8, 128, 4096, 512, 512))
    draft = drafted(run(trainer__device="cuda", trainer__hardware="h100", **layouts), wide, 4)
    (line,) = host_limits(draft)
    assert (
        line in PlanReport.of(make_plan(draft)).reasons and "bottleneck of forwards with fewer tokens than: ref" in line
    )
    ((tokens, has),) = re.findall(r"actor_train, critic_train ([\d,]+) \(has ([\d,]+): launch-bound\)", line)
    share = draft.ranks.shape.shares[0]
    micro = equal_microbatch(draft.inputs.drawn, draft.batch, draft.training.likeliest, share)
    assert has == f"{micro.tokens:,.0f}"
    cost, least = draft.analytic["actor_train"], int(tokens.replace(",", ""))
    for count in (least - 1, least):
        same_lengths = MicrobatchTokens(count, count / micro.tokens * micro.sequences, 0)
        device = sum(cost.stage_seconds(same_lengths).layer)
        assert (device >= sum(cost.host_seconds) / cost.spec.layers) == (count == least)
    assert host_limits(drafted(run(), SPECS, 4)) == ()  # a CPU's layers take turns


def test_files_are_those_that_the_run_will_write():
    saved = files(save_every=5, tensorboard=False, wandb="offline")
    assert PlanReport.of(shared_plan()).files == reasons_of(run()).output_files()
    states = 12 * (SPECS["actor"].parameters() + SPECS["critic"].parameters(scalar_head=True))
    assert saved["checkpoints/iteration-N/"].startswith("every 5 iterations, ") and "wandb/" in saved
    assert readable_bytes(states) in saved["checkpoints/iteration-N/"]
    assert "tensorboard/" not in saved and "export/critic/" in saved and "(no checkpoints)" not in saved
    plain = files()
    assert "(no checkpoints)" in plain and "export/actor/" in plain
    assert "export/actor/" not in files(export=False)
    best = files(eval_every=2, eval_before_train=True, keep_best=True)
    assert best["checkpoints/iteration-N/"].startswith("where the held-out score is the best so far, ")
    assert {"export/actor/", "export/best/actor/"} <= best.keys() and "(no checkpoints)" not in best
    alone = files(iterations=0)
    assert not any(name.startswith("export/") for name in alone)
