"""Rows of what ranks send each other: every byte of a plan once, within machines or across, whatever it is for."""

import pytest
from testkit.four_ranks import SPECS, planned, run

from rlhfuse.planning.report.report import PlanReport
from rlhfuse.planning.report.traffic import TrafficRow, ring, traffic_lines


@pytest.fixture
def on_nodes_of(monkeypatch):
    def made(ranks: int, **keys) -> dict[str, TrafficRow]:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        return {row.purpose: row for row in PlanReport.of(planned(run(**keys))).traffic}

    return made


def test_a_ring_sends_all_but_its_own_part():
    assert list(ring((4, 6, 9), 30.0)) == [(4, 6, 20.0), (6, 9, 20.0), (9, 4, 20.0)]
    assert sum(size for *_, size in ring((3,), 30.0)) == 0
    assert TrafficRow.of("x", [*ring((0, 1, 2), 3.0), (1, 1, 9.0)], 2) == TrafficRow("x", 2, 4)


def test_one_machine_sends_nothing_across_and_the_same_as_two(on_nodes_of):
    alone, two = on_nodes_of(4), on_nodes_of(2)
    moving = {purpose for purpose in two if purpose.startswith("weights of")}
    assert alone.keys() == two.keys() and len(moving) == 2
    for purpose in two.keys() - moving:  # moves go other ways where a part that crosses is forwarded
        assert alone[purpose].across == 0 < alone[purpose].within == two[purpose].within + two[purpose].across


def test_gradients_and_weights_of_replicas(on_nodes_of):
    """critic_train d2t1p2: its two pipelines are on a machine each, so that all that replicas exchange crosses."""
    steps, held = 4, 4 * SPECS["critic"].parameters(scalar_head=True)
    rows = on_nodes_of(2)
    # of a pair each sends half of what the other reduces, and half of what it has summed
    assert rows["critic_train: gradients summed over replicas"] == TrafficRow(
        "critic_train: gradients summed over replicas", 0, 2 * steps * held
    )
    assert rows["critic_train: weights gathered from replicas"].across == steps * held
    assert not any(purpose.startswith("actor_train: gradients") for purpose in rows)  # one pipeline
    plain = on_nodes_of(2, critic__optim={"name": "sgd"})
    assert plain["critic_train: gradients summed over replicas"].across == 2 * steps * held
    assert "critic_train: weights gathered from replicas" not in plain


def test_states_cross_where_a_pipeline_does(on_nodes_of):
    """actor_train d1t1p4: of its three borders one is between the machines, and states go one way, gradients back."""
    rows = on_nodes_of(2)
    actor, critic = (rows[f"{model}_train: hidden states and their gradients"] for model in ("actor", "critic"))
    assert actor.within == pytest.approx(2 * actor.across, abs=2) and actor.across > 0 == critic.across
    assert critic.within == actor.across  # all tokens, over one border


def test_sums_of_tensor_ranks_cross_where_their_group_does(on_nodes_of):
    layouts = dict.fromkeys(("actor_train", "critic_train"), "d1t2p2")
    crossing = {f"parallel__{name}": layout for name, layout in layouts.items()}
    rows = on_nodes_of(2, **crossing)
    assert rows["actor_train: sums over tensor ranks"].across == 0 < rows["actor_train: sums over tensor ranks"].within
    assert rows["actor_train: hidden states and their gradients"].within == 0
    alone = on_nodes_of(1, **crossing)
    assert alone["actor_train: sums over tensor ranks"].across == rows["actor_train: sums over tensor ranks"].within


def test_it_is_read_back_and_summed_for_people():
    report = PlanReport.of(planned(run()))
    raw = report.to_dict()
    assert PlanReport.from_dict(raw) == report and report.traffic
    assert PlanReport.from_dict({name: value for name, value in raw.items() if name != "traffic"}).traffic == ()
    head, *lines, last = traffic_lines(report.traffic)
    assert head.split() == ["in", "a", "node", "across"] and len(lines) == len(report.traffic)
    assert last.startswith("together") and last in report.render()
