"""Runs of models with unequal embedding rows over one tokenizer, and of responses that end at texts or stop tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from testkit.tiny import write_checkpoint, write_run, write_tokenizer

from rlhfuse.run.report.compare import compare_runs

POOL_RANKS = 2

FUNCTION = """
def ended(completion_ids, completions):
    return [score(ids, text) for ids, text in zip(completion_ids, completions)]

def score(ids, text):
    # word i is token i + 3; a response that ends with a word that begins with w19 is cut before it
    last = ids[-1] - 3
    stopped = f"w{last}".startswith("w19")
    words = [i for i in ids if i > 2][: -1 if stopped else None]
    assert text == " ".join(f"w{i - 3}" for i in words) + (" " if stopped and words else ""), text
    assert not any(f"w{i - 3}".startswith("w19") for i in words[3:])
    return float(stopped)
"""


def job(rank: int, config: Path, out: Path, overrides: tuple[str, ...]) -> None:
    import multiprocessing

    from rlhfuse.config.load import load_config
    from rlhfuse.parallel.device import choose_device
    from rlhfuse.run.launch import run_job, with_device
    from rlhfuse.run.preflight import check_inputs

    multiprocessing.current_process()._config["daemon"] = False  # a daemon may not start the reward's processes
    config = with_device(load_config(config, [*overrides, f"trainer.output_dir={out}"]))
    run_job(check_inputs(config, 2), f"tokens-{out.parent.name}-{out.name}", rank, choose_device("cpu", 0, 1))


def rows(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


TP1 = ("parallel.generation=d2t1p1", "parallel.actor_train=d1t1p2", "parallel.critic_train=d2t1p1")
TP2 = ("parallel.generation=d1t2p1", "parallel.actor_train=d1t2p1", "parallel.critic_train=d1t2p1")


@pytest.mark.parametrize("actor_rows, reward_rows", [(330, 288), pytest.param(288, 330, marks=pytest.mark.slow)])
def test_unequal_rows_train_as_the_least_of_them_alone_would(workers, tmp_path, actor_rows, reward_rows):
    """330 rows are padded to 384, 288 to 320: the shares of tensor ranks differ too. The tokenizer has 260 tokens."""
    file = write_run(tmp_path, trainer__iterations=1)
    sizes = {"actor": actor_rows, "reward": reward_rows}
    for role, size in sizes.items():
        scored = role == "reward"
        write_tokenizer(write_checkpoint(tmp_path / role, vocab_size=size, scalar_head=scored, seed=1 + scored), 257)
    workers.run(job, file, tmp_path / "wide", TP1)
    workers.run(job, file, tmp_path / "wide-tp", TP2)
    for role in sizes:
        cut_rows(tmp_path / role, 288)
    workers.run(job, file, tmp_path / "least", TP1)
    exported = load_file(tmp_path / "wide/export/actor/model.safetensors")["model.embed_tokens.weight"]
    assert len(exported) == actor_rows
    compared = ("actor/", "critic/", "response_length/", "rollout/")
    for wide, parted, least in zip(rows(tmp_path / "wide"), rows(tmp_path / "wide-tp"), rows(tmp_path / "least")):
        names = [name for name in least if name.startswith(compared) and not name.endswith("mfu")]
        assert len(names) > 20
        for name in names:
            same = least[name] if isinstance(least[name], str) else pytest.approx(least[name], rel=1e-4, abs=1e-6)
            assert wide[name] == same, name
        assert wide["rollout/train_logprob_abs_diff"] < 1e-5 and parted["rollout/train_logprob_abs_diff"] < 1e-5
        assert parted["critic/score/mean"] == pytest.approx(least["critic/score/mean"], rel=1e-3)
    assert (tmp_path / "wide/samples.jsonl").read_text() == (tmp_path / "least/samples.jsonl").read_text()


def cut_rows(folder: Path, rows: int) -> None:
    """The checkpoint with the first rows of its vocabulary alone."""
    config, file = json.loads((folder / "config.json").read_text()), folder / "model.safetensors"
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": rows}))
    names = ("model.embed_tokens.weight", "lm_head.weight")
    cut = {name: w[:rows].clone() if name in names else w for name, w in load_file(file).items()}
    save_file(cut, str(file), metadata={"format": "pt"})


def test_a_stop_text_ends_responses_wherever_they_are_decoded(workers, tmp_path):
    (tmp_path / "ends.py").write_text(FUNCTION)
    file = write_run(tmp_path, trainer__iterations=2)
    settings = (
        f"reward.function={tmp_path}/ends.py:ended",
        "reward.signature=trl",
        "reward.path=''",
        "algorithm.name=rloo",
        "algorithm.missing_eos_penalty=1",
        "rollout.ignore_eos=true",
        "rollout.stop=[w19]",
        "rollout.min_tokens=4",
    )
    workers.run(job, file, tmp_path / "fused", (*settings, "fusion.threshold=8"))
    workers.run(job, file, tmp_path / "serial", (*settings, "fusion.inter_stage=false", "fusion.intra_stage=false"))
    for compared in compare_runs(tmp_path / "fused", tmp_path / "serial"):
        assert compared.entries > 10 and not compared.differences, compared
    for row in rows(tmp_path / "fused"):
        assert row["fusion/destinations"] == 1 and row["response_length/min"] >= 4
        assert 0 < row["response_length/clip_ratio"] < 1
        assert row["critic/score/mean"] == pytest.approx(1 - row["response_length/clip_ratio"])
    plan = json.loads((tmp_path / "fused/plan.json").read_text())
    ends = "a response (of 4 tokens or more) ends with the text 'w19', after 24 tokens"
    assert ends in plan["reasons"]


def test_stop_tokens_end_responses_beside_the_models_own(workers, tmp_path):
    file = write_run(tmp_path, trainer__iterations=1, trainer__sample_texts=16)
    (tmp_path / "actor/generation_config.json").write_text('{"eos_token_id": [2, 7, 8, 9, 10, 11, 12]}')
    stop = [*range(13, 30)]
    workers.run(job, file, tmp_path / "run", (f"rollout.stop_token_ids={stop}",))
    samples = [json.loads(line) for line in (tmp_path / "run/samples.jsonl").read_text().splitlines()]
    ended = [one["response"].split()[-1] for one in samples if one["finish_reason"] == "stop" and one["response"]]
    numbers = {int(word[1:]) + 3 for word in ended}
    assert numbers & {*range(7, 13)} and numbers & {*stop} and len(samples) == 16
    for one in samples:
        inside = one["response"].split()[: -1 if one["finish_reason"] == "stop" else None]
        assert not {int(word[1:]) + 3 for word in inside} & {2, *range(7, 30)}
