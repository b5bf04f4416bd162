"""Random numbers of torch's operators on the stand-in."""

import pytest
import torch
from torch.nn import functional
from values import DEVICE


def draws(device=DEVICE):
    x = torch.ones(50, device=device)
    return torch.cat(
        [
            torch.rand(50, device=device),
            torch.randn(50, device=device),
            x.bernoulli(0.5),
            functional.dropout(x, 0.5),
            torch.randperm(50, device=device),
            torch.randint(9, (50,), device=device),
            x.multinomial(50),
        ]
    )


def test_a_seed_repeats_random_numbers():
    torch.manual_seed(3)
    first, second = draws(), draws()
    torch.manual_seed(3)
    assert torch.equal(first, draws())
    assert not torch.equal(first, second)


def test_a_state_repeats_random_numbers():
    state = torch.cuda.get_rng_state()
    first = draws()
    torch.cuda.set_rng_state(state)
    assert torch.equal(first, draws())


def test_a_generator_has_numbers_of_its_own():
    generator = torch.Generator(DEVICE).manual_seed(5)
    first = torch.rand(9, device=DEVICE, generator=generator)
    draws()
    generator.manual_seed(5)
    assert torch.equal(first, torch.rand(9, device=DEVICE, generator=generator))


def test_the_generator_of_the_cpu_is_not_used():
    state = torch.get_rng_state()
    draws()
    assert torch.equal(state, torch.get_rng_state())


def test_dropout_drops_its_part_and_scales_the_rest():
    y = functional.dropout(torch.ones(10_000, device=DEVICE), 0.25)
    assert y.unique().tolist() == [0, pytest.approx(4 / 3)]
    assert 0.72 < (y > 0).float().mean().item() < 0.78


def test_replays_of_a_graph_draw_new_numbers():
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        numbers = torch.rand(9, device=DEVICE)
    seen = []
    for _ in range(2):
        graph.replay()
        seen.append(numbers.tolist())
    assert seen[0] != seen[1]
    torch.manual_seed(1)
    graph.replay()
    first = numbers.tolist()
    torch.manual_seed(1)
    graph.replay()
    assert numbers.tolist() == first
