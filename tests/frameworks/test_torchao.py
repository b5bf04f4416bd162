"""torchao's switch of an exported training graph to evaluation, and back."""

import copy

import torch
from support.compiling import build, small


def train_evaluate_train(rank, world_size):
    from torchao.quantization import pt2e

    x = torch.randn(world_size, 4, 3, 6, 6, dtype=torch.float64)[rank].requires_grad_()
    model = build(small)
    eager = copy.deepcopy(model)
    graph = torch.export.export(model, (x,)).module()
    pt2e.allow_exported_model_train_eval(graph)

    def both(x):
        outputs, inputs = [run(x) for run in (graph, eager)], [x, *eager.parameters()]
        # float64 in another order of operations
        torch.testing.assert_close(*outputs, rtol=1e-9, atol=1e-11)
        gradients = torch.autograd.grad(outputs[0].sum() * 2, [x, *graph.parameters()])
        expected = torch.autograd.grad(outputs[1].sum() * 2, inputs)
        for ours, theirs in zip(gradients, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-9)
        for ours, theirs in zip(graph.buffers(), eager.buffers(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)

    both(x)
    graph.eval(), eager.eval()
    if rank == 0:  # one rank suffices: evaluation runs no collective
        both(x + 1)
    graph.train(), eager.train()
    both(x - 1)


def test_exported_graph_of_a_group_switches_to_evaluation_and_back(two_ranks):
    two_ranks.run(train_evaluate_train)
