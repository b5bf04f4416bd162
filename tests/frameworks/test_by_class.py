"""Code that finds batch normalization layers by their class, on converted models."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from syncbn import SyncBatchNorm, convert_sync_batchnorm, revert_sync_batchnorm

# These packages import scripted code, which torch deprecates.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
]


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 5), nn.BatchNorm1d(5)
    ).double()


def batches():
    generator = torch.Generator().manual_seed(1)
    return list(torch.randn(3, 8, 3, 6, 6, dtype=torch.float64, generator=generator))


def update_with_fvcore(model):
    from fvcore.nn.precise_bn import update_bn_stats

    update_bn_stats(model, batches(), 3)


def update_with_torch(model):
    torch.optim.swa_utils.update_bn(batches(), model)


@pytest.mark.works("re-estimation by class: fvcore's `update_bn_stats`, `swa_utils.update_bn`")
@pytest.mark.parametrize("update", [update_with_fvcore, update_with_torch])
def test_statistics_are_estimated_again(update):
    plain = network()
    converted = convert_sync_batchnorm(copy.deepcopy(plain))
    before = copy.deepcopy(plain.state_dict())
    update(plain)
    update(converted)
    for (name, expected), actual in zip(
        plain.state_dict().items(), converted.state_dict().values(), strict=True
    ):
        # float64, by its default tolerances
        torch.testing.assert_close(actual, expected, msg=name)
        assert "running" not in name or not torch.equal(actual, before[name])


def count_with_fvcore(model):
    from fvcore.nn import FlopCountAnalysis, parameter_count

    counted = FlopCountAnalysis(model.eval(), batches()[0])
    return counted.by_operator(), parameter_count(model)[""]


def count_with_torch(model):
    with FlopCounterMode(display=False) as counter:
        model(batches()[0]).sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("count", [count_with_fvcore, count_with_torch])
def test_operations_are_counted_as_before(count):
    counted = count(network())
    assert counted and count(convert_sync_batchnorm(network())) == counted


def freeze_with_timm(model):
    from timm.utils import freeze

    freeze(model, ["1", "4"])
    return model


def freeze_images_with_timm(model):
    from timm.utils.model import freeze_batch_norm_2d

    return freeze_batch_norm_2d(model)


@pytest.mark.works("freezing by class: timm's `freeze` and `freeze_batch_norm_2d`")
@pytest.mark.parametrize("freeze", [freeze_with_timm, freeze_images_with_timm])
def test_timm_freezes(freeze):
    plain = network()
    converted = freeze(convert_sync_batchnorm(copy.deepcopy(plain)))
    plain = freeze(plain)
    assert type(converted[1]) is type(plain[1]) and "Frozen" in type(plain[1]).__name__
    assert isinstance(converted[4], SyncBatchNorm)  # timm freezes only layers of images
    trained = [p.requires_grad for p in plain.parameters()]
    assert [p.requires_grad for p in converted.parameters()] == trained
    for x in batches():
        # float64, by its default tolerances
        torch.testing.assert_close(converted(x), plain(x))
    assert torch.equal(converted[1].running_mean, torch.zeros(4).double())


@pytest.mark.works("freezing by class: timm's `freeze` and `freeze_batch_norm_2d`")
def test_timm_freezes_its_own_layers():
    from timm.layers import BatchNormAct2d
    from timm.utils.model import freeze_batch_norm_2d

    plain = nn.Sequential(BatchNormAct2d(3)).double()
    converted = convert_sync_batchnorm(copy.deepcopy(plain))
    x = torch.randn(4, 3, 5, 5, dtype=torch.float64)
    plain(x), converted(x)
    plain, converted = freeze_batch_norm_2d(plain), freeze_batch_norm_2d(converted)
    assert type(converted[0]) is type(plain[0]) and "Frozen" in type(plain[0]).__name__
    # float64, by its default tolerances
    torch.testing.assert_close(converted(x), plain(x))


@pytest.mark.works("weight decay by class: `isinstance(module, nn.BatchNorm2d)`")
@pytest.mark.parametrize("classes", [nn.BatchNorm2d, nn.modules.batchnorm._BatchNorm])
def test_weight_decay_is_filtered_by_class(classes):
    def undecayed(model):
        modules = [(name, m) for name, m in model.named_modules() if isinstance(m, classes)]
        return [f"{name}.{key}" for name, m in modules for key, _ in m.named_parameters()]

    plain = network()
    expected = undecayed(plain)
    assert expected and undecayed(convert_sync_batchnorm(plain)) == expected


@pytest.mark.works("PyG's BatchNorm")
def test_layer_of_pyg_is_converted_inside():
    from torch_geometric.nn import BatchNorm

    layer, x = BatchNorm(5).double(), torch.randn(7, 5, dtype=torch.float64)
    converted = convert_sync_batchnorm(nn.Sequential(copy.deepcopy(layer)))
    assert type(converted[0]) is BatchNorm and isinstance(converted[0].module, SyncBatchNorm)
    # float64, by its default tolerances
    torch.testing.assert_close(converted(x), layer(x))
    assert repr(revert_sync_batchnorm(converted)[0]) == repr(layer)


def train_quantized(rank, world_size, is_share):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    quantization = torch.ao.quantization
    model.qconfig = quantization.get_default_qat_qconfig("x86")
    model = quantization.prepare_qat(quantization.fuse_modules_qat(model, [["0", "1", "2"]]))
    if is_share:
        model = convert_sync_batchnorm(model)
        assert isinstance(model[0].bn, SyncBatchNorm)
    x = torch.cat(batches()).float()
    for share in x.view(2, 2, -1, 3, 6, 6).unbind() if is_share else x.chunk(2):
        model(share[rank] if is_share else share)
    converted = quantization.convert(revert_sync_batchnorm(model).eval())
    return model[0].bn.state_dict(), type(converted[0]).__name__


@pytest.mark.works("quantization-aware training: `prepare_qat`, then conversion")
# torch's own warning: its quantization is deprecated.
@pytest.mark.filterwarnings("ignore:Please use quant_min and quant_max:UserWarning")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor.*:UserWarning")
@pytest.mark.filterwarnings("ignore:.*quantization:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.ao:FutureWarning")
def test_quantization_aware_training(two_ranks):
    expected, _ = train_quantized(0, 1, False)
    for state, name in two_ranks.run(train_quantized, True):
        assert name == "ConvReLU2d"
        for key, value in expected.items():
            # float32, fake quantization of weights that no rank changes: default tolerances
            torch.testing.assert_close(state[key], value, msg=key)
