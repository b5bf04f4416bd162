"""Models to compile, and the comparison of a compiled step with an eager one.

The models are here, so that ranks find them: pytest imports test files under other names.
"""

import copy
import re

import torch
from torch import nn

from support.cases import make_input
from syncbn import SyncBatchNorm, convert_sync_batchnorm


class Backend:
    """A backend of torch.compile that counts the graphs it is given."""

    def __init__(self, name):
        torch._dynamo.reset()
        self.compile = torch._dynamo.lookup_backend(name)
        self.graphs = 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        return self.compile(graph, inputs)


def compiled(model, backend):
    return torch.compile(model, backend=backend, fullgraph=True)


def small():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.BatchNorm2d(4, momentum=None)
    )


def frozen():
    """No affine part, no running statistics, a frozen affine part, only a weight."""
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4, affine=False),
        nn.BatchNorm2d(4, track_running_stats=False),
        nn.BatchNorm2d(4).requires_grad_(False),
        SyncBatchNorm(4, bias=False),
    )
    nn.init.normal_(model[3].weight)
    return model


class Swish(nn.BatchNorm2d):
    """A subclass that calls its own module after its base class."""

    def __init__(self, channels):
        super().__init__(channels)
        self.activation = nn.SiLU()

    def forward(self, input):
        return self.activation(super().forward(input))


def swishes():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), Swish(4), Swish(4))


def resnet10():
    from torchvision.models.resnet import BasicBlock, ResNet

    return ResNet(BasicBlock, [1, 1, 1, 1], num_classes=4)


def resnet10t():
    import timm

    return timm.create_model("resnet10t", num_classes=4)


class Gan(nn.Module):
    """A generator and a discriminator that runs twice before the backward pass."""

    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 3, 1))
        self.discriminator = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.LeakyReLU(), nn.Conv2d(8, 1, 3)
        )

    def forward(self, x):
        fake = self.generator(x)
        return self.discriminator(x) - self.discriminator(fake.detach()).square()


class Residual(nn.Module):
    """Two branches whose order only the program defines."""

    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(nn.Conv2d(3, 5, 1), nn.BatchNorm2d(5), nn.ReLU())
        self.main2 = nn.Sequential(nn.Conv2d(5, 6, 1), nn.BatchNorm2d(6))
        self.shortcut = nn.Sequential(nn.Conv2d(3, 6, 1), nn.BatchNorm2d(6))

    def forward(self, x):
        return torch.relu(self.main2(self.main(x)) + self.shortcut(x))


class Twice(nn.Module):
    """A layer that normalizes the same input twice."""

    def __init__(self):
        super().__init__()
        self.layer = nn.BatchNorm2d(3)

    def forward(self, x):
        return self.layer(x) - 2 * self.layer(x)


class Branches(nn.Module):
    """Parallel layers of different widths, one of them with an unused output."""

    def __init__(self):
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(3, 4 + i, 1) for i in range(3))
        self.layers = nn.ModuleList(nn.BatchNorm2d(4 + i) for i in range(3))
        self.unused = nn.BatchNorm2d(3, track_running_stats=False)

    def forward(self, x):
        self.unused(x)
        pairs = zip(self.convolutions, self.layers, strict=True)
        return sum(layer(convolution(x)).mean(1) for convolution, layer in pairs)


def build(make):
    torch.manual_seed(0)
    return convert_sync_batchnorm(make()).double()


def step(model, x, training=True):
    """Train or evaluate on a batch; return the output, the gradients and the model's state."""
    model.train(training)
    output = model(x)
    if training:
        output.square().sum().backward()
    state = dict(model.named_buffers())
    state.update((f"{name} grad", p.grad) for name, p in model.named_parameters())
    wrappers = re.compile(r"_orig_mod\.|module\.")
    return output.detach(), {wrappers.sub("", k): copy.deepcopy(v) for k, v in state.items()}


def assert_equal(actual, expected):
    (output, state), (expected_output, expected_state) = actual, expected
    assert state.keys() == expected_state.keys()
    pairs = [(output, expected_output, "output")]
    pairs += [(state[name], expected_state[name], name) for name in state]
    for a, b, name in pairs:
        # float64 in another order of operations, amplified by division by small variances
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9, msg=name)


def batch(rank, sizes, pixels, seed):
    shape = (sizes[rank % len(sizes)], 3, pixels, pixels)
    return make_input(shape, "contiguous", torch.float64, seed=10 * seed + rank)
