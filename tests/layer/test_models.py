"""Real models trained under DDP on two ranks, against one process with the whole batch."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from syncbn import SyncBatchNorm, convert_sync_batchnorm

# Both models are wide enough for real gradients and small enough for seconds.
IMAGES = (8, 3, 64, 64)


def build(name):
    torch.manual_seed(0)
    if name == "resnet18":
        import torchvision

        return torchvision.models.resnet18(num_classes=10)
    import timm

    return timm.create_model(name, num_classes=10)


def train(model, batches, targets):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for x, target in zip(batches, targets, strict=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), target).backward()
        optimizer.step()


def data():
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(IMAGES, generator=generator, dtype=torch.float64) for _ in range(2)]
    targets = [torch.randint(0, 10, IMAGES[:1], generator=generator) for _ in range(2)]
    return batches, targets


def train_share(rank, world_size, name):
    model = DistributedDataParallel(convert_sync_batchnorm(build(name)).double())
    batches, targets = data()
    train(
        model,
        [x.chunk(world_size)[rank] for x in batches],
        [t.chunk(world_size)[rank] for t in targets],
    )
    assert any(isinstance(m, SyncBatchNorm) for m in model.modules())
    assert not any(type(m).__name__.startswith("BatchNorm") for m in model.modules())
    return model.module.state_dict()


@pytest.mark.works("models of torchvision and timm under `DistributedDataParallel`")
@pytest.mark.parametrize("name", ["resnet18", "resnet10t", "mobilenetv3_small_050"])
def test_two_ranks_train_as_the_whole_batch(two_ranks, name):
    model = build(name).double()
    train(model, *data())
    expected = model.state_dict()
    for state in two_ranks.run(train_share, name):
        assert state.keys() == expected.keys()
        for key, value in expected.items():
            # float64; two steps through some twenty layers that divide by small variances
            torch.testing.assert_close(state[key], value, rtol=1e-7, atol=1e-9, msg=key)


def average_and_update(rank, world_size):
    model = convert_sync_batchnorm(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    averaged = torch.optim.swa_utils.AveragedModel(model)
    generator = torch.Generator().manual_seed(2)
    batches = list(torch.randn(3, 4, 3, generator=generator).tensor_split(world_size, 1)[rank])
    torch.optim.swa_utils.update_bn(batches, averaged)
    layer = averaged.module[1]
    return layer.running_mean, layer.num_batches_tracked.item(), layer.momentum


@pytest.mark.works("`torch.optim.swa_utils`: `AveragedModel`, `update_bn`")
def test_swa_update_bn(any_world):
    world = any_world.run(average_and_update)
    for mean, count, momentum in world:
        assert count == 3 and momentum == 0.1
        assert torch.equal(mean, world[0][0]) and mean.any()


# Training records our function, evaluation torch's batch norm.
@pytest.mark.works("torchvision's `create_feature_extractor`")
@pytest.mark.filterwarnings("ignore:The nodes obtained by tracing")
def test_feature_extraction():
    from torchvision.models.feature_extraction import create_feature_extractor

    model = convert_sync_batchnorm(build("resnet18")).eval()
    x = torch.rand(1, 3, 64, 64)
    features = create_feature_extractor(model, ["fc"])(x)["fc"]
    assert torch.equal(features, model(x))
