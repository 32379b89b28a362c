"""Weights and optimizer states in host memory: one stretch for all of them, there and back bit for bit."""

import threading

import pytest
import torch
from testkit.training_pair import Plan, build_roles, write_pair

from rlhfuse.base.clock import Clock
from rlhfuse.fusion.inter.inference import WeightLoader
from rlhfuse.parallel.background import Background
from rlhfuse.parallel.device import choose_device
from rlhfuse.parallel.offload import ALIGNMENT, HostBlock, OffloadedWeights, RestingTensors

POOL_RANKS = 2
CPU = choose_device("cpu", 0, 1)


def network(dtype=torch.float32) -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(33, 17), torch.nn.Linear(17, 5)).to(dtype).requires_grad_(False)


def test_a_stretch_is_as_large_as_its_tensors():
    """Not rounded up to a power of two, which takes 16 MiB for these 9 MiB."""
    kinds = {"a": (torch.Size([3, 1 << 20]), torch.bfloat16), "b": (torch.Size([7]), torch.float32)}
    kinds["c"] = (torch.Size([3 << 18]), torch.float32)
    block = HostBlock(kinds, CPU)
    needed = sum(shape.numel() * dtype.itemsize for shape, dtype in kinds.values())
    assert needed <= block.nbytes < needed + len(kinds) * ALIGNMENT
    ends = 0
    for name, (shape, dtype) in kinds.items():
        tensor = block.tensors[name]
        assert (tensor.shape, tensor.dtype) == (shape, dtype) and tensor.is_contiguous()
        start = tensor.data_ptr() - block.tensors["a"].data_ptr()
        assert start % ALIGNMENT == 0 and start >= ends
        ends = start + tensor.nbytes
        assert tensor.untyped_storage().data_ptr() == block.tensors["a"].untyped_storage().data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_there_and_back(dtype):
    module = network(dtype)
    wanted = [weight.clone() for weight in module.parameters()]
    offloaded = OffloadedWeights(module, CPU)
    offloaded.offload()
    assert offloaded.host_bytes >= sum(weight.nbytes for weight in wanted)
    for _ in range(2):
        assert not offloaded.loaded and sum(weight.nbytes for weight in module.parameters()) == 0
        offloaded.load()
        assert all(map(torch.equal, module.parameters(), wanted))
        addresses = [weight.data_ptr() for weight in module.parameters()]
        offloaded.load()  # there is nothing to do
        assert addresses == [weight.data_ptr() for weight in module.parameters()]
        offloaded.release()


@pytest.mark.parametrize("fails", [False, True])
def test_weights_that_arrive_meanwhile_are_waited_for(fails):
    """Nothing is loaded before they are all in host memory; what bringing them raises, whoever loads them raises."""
    wanted, offloaded, begun, go_on = network(), OffloadedWeights(network(), CPU), threading.Event(), threading.Event()
    offloaded.expose()
    copies = [weight.data.fill_(torch.nan) for weight in offloaded.module.parameters()]
    offloaded.release()

    def bring() -> None:
        begun.set()
        assert go_on.wait(540)
        if fails:
            raise OSError("the link is cut")
        for copy, weight in zip(copies, wanted.parameters()):
            copy.copy_(weight)

    offloaded.arrival = Background(bring, "weight-mover", CPU.torch_device, Clock())
    loader = WeightLoader([offloaded], CPU.torch_device)
    assert begun.wait(540) and not offloaded.arrival.done
    go_on.set()
    if fails:
        with pytest.raises(OSError, match="the link is cut"):
            loader.wait(0)
        offloaded.release()
        with pytest.raises(OSError, match="the link is cut"):
            offloaded.load()
        return
    loader.wait(0)
    assert all(map(torch.equal, offloaded.module.parameters(), wanted.parameters()))


def test_weights_that_are_filled_in_host_memory():
    module, wanted = network(), network()
    for weight in module.parameters():
        weight.fill_(torch.nan)
    offloaded = OffloadedWeights(module, CPU)
    offloaded.expose()
    module.load_state_dict(wanted.state_dict())
    offloaded.release()
    offloaded.load()
    assert all(map(torch.equal, module.parameters(), wanted.parameters()))


def test_memory_is_there_before_the_copies_begin():
    """It is taken by the stream that computes; the loader's thread only fills it."""
    modules = [network() for _ in range(3)]
    offloaded = [OffloadedWeights(module, CPU) for module in modules]
    for one in offloaded:
        one.offload()
    loader = WeightLoader(offloaded, torch.device("cpu"))
    addresses = [weight.data_ptr() for module in modules for weight in module.parameters()]
    assert 0 not in addresses
    loader.close()
    assert addresses == [weight.data_ptr() for module in modules for weight in module.parameters()]
    assert all(torch.equal(*pair) for module in modules for pair in zip(module.parameters(), network().parameters()))


def test_tensors_rest_in_host_memory_and_come_back():
    """They stay the same objects, which an optimizer looks up by; later there are more of them."""
    found = {"main": torch.arange(1000.0)}
    states = RestingTensors(lambda: found, CPU)
    held = []
    for _ in range(2):
        for name, kept in [(name, one) for name, one in found.items()]:
            held.append((name, kept, kept.clone(), kept.untyped_storage().data_ptr()))
        states.leave()
        assert all(one.untyped_storage().data_ptr() == place for _, one, _, place in held)  # still being copied
        states.free()
        first = states.host_bytes
        assert all(torch.equal(one, values) for _, one, values, _ in held)
        assert all(
            one.untyped_storage().nbytes() == len(states._blocks[n > 0]._memory) for n, (_, one, *_) in enumerate(held)
        )
        states.free()
        states.leave()  # nothing to do
        states.come_back()
        states.wait()
        assert all(torch.equal(one, values) and one.untyped_storage().nbytes() == 4000 for _, one, values, _ in held)
        assert states.host_bytes == first == len(found) * 4096
        held.clear()
        found["moment"] = torch.ones(1000)
        found["main"] += 1
    states.leave()
    found["main"] += 1
    states.come_back()  # before its memory was given back: nothing is overwritten
    assert torch.equal(found["main"], torch.arange(1000.0) + 3)


# what a rank holds when its models are built --------------------------------------------------------------------

WIDE = dict(num_hidden_layers=2, vocab_size=30_000)


def start(rank: int, folders: dict) -> dict[str, int]:
    """Build the models of one rank; bytes by part."""
    models = build_roles(rank, folders, Plan("d1t1p2", "d2t1p1"), "d2t1p1", trainer={"dtype": "float32"})
    optimizers = [model.optimizer for model in models.trained.values()]
    gradients = [buffer.grad_data for optimizer in optimizers for buffer in optimizer._buffers()]
    result = {
        "gradients": sum(gradient.nbytes for gradient in gradients),
        "gradients_held": sum(gradient.untyped_storage().nbytes() for gradient in gradients),
        "copies": sum(w.nbytes for w in models.generation.module.parameters()),
        "scorers": sum(w.nbytes for model in models.frozen.values() for w in model.stage.model.parameters()),
        "host": sum(model.offloaded.host_bytes for model in models.frozen.values()),
    }
    for optimizer in optimizers:
        optimizer.zero_grad()
    result["gradients_taken"] = sum(gradient.untyped_storage().nbytes() for gradient in gradients)
    models.groups.close()
    return result


def test_a_start_takes_what_trains_and_nothing_of_the_copies(workers, tmp_path):
    for result in workers.run(start, write_pair(tmp_path, WIDE, WIDE)):
        assert result["copies"] == result["scorers"] == result["gradients_held"] == 0
        assert result["gradients_taken"] == result["gradients"] > 5e6
        assert result["host"] > 20e6  # reference and reward; the critic's copy is made with its first move
