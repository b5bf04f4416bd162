"""Models of torchvision and timm, converted and fused by one call."""

import copy

import pytest
import torch
from support.fused_models import assert_same, fuse_a_copy
from torch.nn.parallel import DistributedDataParallel

from syncbn import (
    SyncBatchNorm,
    convert_sync_batchnorm,
    explain_fusion,
    fuse_activations,
    revert_sync_batchnorm,
)

# Numbers of layers fused with an activation, of these with a residual, and of all layers. In
# ResNets the layers of shortcuts stay, because the other addend is fused; MobileNetV3 also has
# Hardswish.
MODELS = {
    "torchvision.resnet18": (17, 8, 20),
    "torchvision.mobilenet_v3_large": (11, 0, 46),
    "timm.resnet50": (49, 16, 53),
    "timm.efficientnet_b0": (33, 0, 49),
}


def build(name):
    torch.manual_seed(0)
    library, _, model = name.partition(".")
    if library == "timm":
        import timm

        return timm.create_model(model, num_classes=10).double()
    import torchvision

    return getattr(torchvision.models, model)(num_classes=10).double()


def images(size=32):
    generator = torch.Generator().manual_seed(1)
    return torch.randn((4, 3, size, size), generator=generator, dtype=torch.float64)


@pytest.mark.works("`fuse_activations` with models of torchvision and timm")
@pytest.mark.parametrize("name", MODELS)
def test_models(name):
    original = build(name)
    model = convert_sync_batchnorm(copy.deepcopy(original))
    report = explain_fusion(model)
    residuals = sum(layer.residual for layer in report.fused)
    counts = (len(report.fused), residuals, len(report.fused) + len(report.left))
    assert counts == MODELS[name]
    fused = fuse_a_copy(model, images())
    assert explain_fusion(fused) == report
    reverted = revert_sync_batchnorm(fused)
    assert str(reverted) == str(original)
    assert [*map(type, reverted.modules())] == [*map(type, original.modules())]
    assert_same(original, reverted, images())


def test_unfused_layers_of_a_resnet():
    report = explain_fusion(convert_sync_batchnorm(build("torchvision.resnet50")))
    assert ("layer1.0.bn3", "relu", True) in report.fused
    places = [f"layer{i}.0.downsample.1" for i in (1, 2, 3, 4)]
    assert report.left == [(name, "is added to another layer, which is fused") for name in places]


def test_unfused_layers_of_mobilenets():
    report = explain_fusion(convert_sync_batchnorm(build("torchvision.mobilenet_v3_large")))
    reasons = {layer.reason for layer in report.left}
    assert reasons == {
        "is followed by Hardswish, which cannot be fused",
        "is followed by no activation",
    }


@pytest.mark.filterwarnings("ignore:The nodes obtained by tracing")
def test_feature_extraction():
    from torchvision.models.feature_extraction import create_feature_extractor

    model = fuse_activations(convert_sync_batchnorm(build("torchvision.resnet18"))).eval()
    features = create_feature_extractor(model, ["fc"])(images())["fc"]
    assert torch.equal(features, model(images()))


def test_methods_of_timms_models():
    model = convert_sync_batchnorm(build("timm.resnet50"))
    expected = copy.deepcopy(model).forward_features(images())
    fused = fuse_activations(model)
    assert type(fused).__name__ == "FusedResNet" and fused.get_classifier() is fused.fc
    # float64, by its default tolerances
    torch.testing.assert_close(fused.forward_features(images()), expected)


def train(model, x):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def train_share(rank, world_size, name):
    model = fuse_activations(convert_sync_batchnorm(build(name)))
    assert len(explain_fusion(model).fused) == MODELS[name][0]
    train(DistributedDataParallel(model), images(64).chunk(world_size)[rank])
    assert any(isinstance(m, SyncBatchNorm) for m in model.modules())
    return model.state_dict()


@pytest.mark.works("`fuse_activations` under `DistributedDataParallel`")
@pytest.mark.parametrize("name", ["torchvision.resnet18", "timm.efficientnet_b0"])
def test_two_ranks_train_as_the_whole_batch(two_ranks, name):
    model = build(name)
    if name.startswith("timm"):
        for module in model.modules():
            assert getattr(module, "drop_prob", 0.0) == 0.0  # else ranks would draw differently
    train(model, images(64))  # smaller ones leave too few values for a variance
    expected = model.state_dict()
    for state in two_ranks.run(train_share, name):
        assert [*state] == [*expected]
        for key, value in expected.items():
            # float64; two steps through some fifty layers that divide by small variances
            torch.testing.assert_close(state[key], value, rtol=1e-7, atol=1e-9, msg=key)
