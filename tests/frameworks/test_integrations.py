"""Each framework's lines in docs/integrations.md train on two ranks as on the whole batch."""

import os
import re
import sys
import types
from unittest import mock

import pytest
import torch
from support.paths import ROOT
from support.ranks import Ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from syncbn import SyncBatchNorm, convert_sync_batchnorm

DOCUMENT = ROOT / "docs" / "integrations.md"


def lines(heading):
    """Return the Python blocks under a heading of the document."""
    (section,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", DOCUMENT.read_text(), re.M | re.S)
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)


def test_every_block_of_the_document_is_run_below():
    headings = re.findall(r"^## (.*)$", DOCUMENT.read_text(), re.MULTILINE)
    blocks = {"MMEngine": 2}
    blocks |= dict.fromkeys(("Lightning", "Accelerate", "Hugging Face Trainer", "timm"), 1)
    blocks |= dict.fromkeys(HEADINGS, 1)
    assert {heading: len(lines(heading)) for heading in headings} == blocks


def profile_by_class(model, inputs, custom_ops):
    """Like thop: rules by exact class, run as hooks; a layer without a rule counts nothing."""

    def count(layer, inputs, output):
        layer.total_ops += custom_ops[type(layer)](layer, inputs, output)

    layers = [layer for layer in model.modules() if type(layer) in custom_ops]
    for layer in layers:
        layer.total_ops = 0
        layer.register_forward_hook(count)
    model.eval()(*inputs)
    parameters = sum(p.numel() for layer in layers for p in layer.parameters())
    return sum(layer.total_ops for layer in layers), parameters


def test_rule_for_a_counter_of_operations():
    (code,) = re.findall(
        r"```python\n(.*?)```", DOCUMENT.read_text().partition("\n## ")[0], re.DOTALL
    )
    thop, hooks = types.ModuleType("thop"), types.ModuleType("thop.vision.basic_hooks")
    thop.profile = profile_by_class
    hooks.count_normalization = lambda layer, inputs, output: 2 * inputs[0].numel()
    model, x = convert_sync_batchnorm(network()), torch.rand(2, 3, 6, 6).double()
    with mock.patch.dict(sys.modules, {thop.__name__: thop, hooks.__name__: hooks}):
        names = run_lines(code, model=model, x=x)
    assert (names["operations"], names["parameters"]) == (2 * 2 * 4 * 4 * 4, 2 * 4)


def run_lines(code, **names):
    """Run the document's lines with ``names`` defined; return all names defined afterwards."""
    exec(compile(code, f"<{DOCUMENT.name}>", "exec"), names)
    return names


# Frameworks may warn; syncbn must not.
others_warn = pytest.mark.filterwarnings("ignore", "error:.*(syncbn|SyncBatchNorm)")


@pytest.fixture(scope="module")
def two_ranks():
    """Separate processes, because frameworks change global state."""
    # Importing a framework is slow on a loaded machine.
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "CUDA_VISIBLE_DEVICES": ""}
    with Ranks(2, env=env, case_seconds=150) as ranks:
        yield ranks


def tell_rank(rank):
    """Set the rank's environment variables, as torchrun does."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))


# The training: two steps of four images, two for each rank.


def network():
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
    return layers.append(nn.Linear(64, 2)).double()


def images():
    return list(torch.rand(8, 3, 6, 6, generator=torch.Generator().manual_seed(1)).double())


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def loss_of(outputs):
    return outputs.square().mean()


def train(model, batches, optimizer, backward=torch.Tensor.backward):
    for batch in batches:
        optimizer.zero_grad()
        backward(loss_of(model(batch)))
        optimizer.step()
    return model.state_dict()


def check(states, expected):
    for state in states:
        assert state.keys() == expected.keys()
        for key, value in expected.items():
            # float64; two steps through a layer that divides by a small variance
            torch.testing.assert_close(state[key], value, rtol=1e-7, atol=1e-9, msg=key)


@pytest.fixture
def whole_batch():
    model = network()
    return train(model, DataLoader(images(), batch_size=4), sgd(model))


def train_with_lightning(rank, world_size, code):
    from pytorch_lightning import LightningModule

    class Net(LightningModule):
        def __init__(self):
            super().__init__()
            self.layers = network()

        def training_step(self, batch, index):
            assert isinstance(self.layers[1], SyncBatchNorm)
            return loss_of(self.layers(batch))

        def configure_optimizers(self):
            return sgd(self)

    tell_rank(rank)
    model = Net()
    options = {"accelerator": "cpu", "devices": 2, "strategy": "ddp", "max_epochs": 1}
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    options.update(dict.fromkeys(quiet, False))
    options["use_distributed_sampler"] = False  # Lightning's shuffles
    sampler = DistributedSampler(images(), shuffle=False)
    loader = DataLoader(images(), batch_size=2, sampler=sampler)
    run_lines(code, model=model, loader=loader, options=options)
    assert type(model.layers[1]) is nn.BatchNorm2d
    return model.layers.state_dict()


@others_warn
@pytest.mark.works("Lightning: `Trainer` with a plugin in place of `sync_batchnorm=True`")
def test_lightning(two_ranks, whole_batch):
    (code,) = lines("Lightning")
    check(two_ranks.run(train_with_lightning, code), whole_batch)


def train_with_accelerate(rank, world_size, code):
    os.environ["ACCELERATE_USE_CPU"] = "true"
    from accelerate import Accelerator

    tell_rank(rank)
    model = network()
    names = {"model": model, "optimizer": sgd(model), "loader": DataLoader(images(), batch_size=2)}
    names = run_lines(code, accelerator=Accelerator(), **names)
    accelerator = names["accelerator"]
    train(names["model"], names["loader"], names["optimizer"], accelerator.backward)
    model = accelerator.unwrap_model(names["model"])
    assert isinstance(model[1], SyncBatchNorm)
    return model.state_dict()


@others_warn
@pytest.mark.works("Hugging Face Accelerate: `Accelerator.prepare`")
def test_accelerate(two_ranks, whole_batch):
    (code,) = lines("Accelerate")
    check(two_ranks.run(train_with_accelerate, code), whole_batch)


def train_with_transformers(rank, world_size, code, folder):
    from transformers import TrainingArguments

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = network()

        def forward(self, image):
            return {"loss": loss_of(self.layers(image))}

    tell_rank(rank)
    model = Net()
    arguments = TrainingArguments(
        folder,
        use_cpu=True,
        ddp_backend="gloo",
        # One step of all images, because the Trainer shuffles them.
        per_device_train_batch_size=4,
        max_steps=1,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    options = {"args": arguments, "train_dataset": [{"image": image} for image in images()]}
    options["optimizers"] = (sgd(model), None)
    trainer = run_lines(code, model=model, options=options)["trainer"]
    assert trainer.args.world_size == 2 and isinstance(model.layers[1], SyncBatchNorm)
    trainer.train()
    return model.layers.state_dict()


@others_warn
@pytest.mark.works("Hugging Face Trainer")
def test_transformers(two_ranks, tmp_path):
    (code,) = lines("Hugging Face Trainer")
    model = network()
    expected = train(model, [torch.stack(images())], sgd(model))
    check(two_ranks.run(train_with_transformers, code, str(tmp_path)), expected)


def timm_model():
    import timm

    torch.manual_seed(0)
    return timm.create_model("mobilenetv3_small_050", num_classes=2).double()


def train_with_timm(rank, world_size, code):
    from timm.utils import ModelEmaV3

    model = run_lines(code)["convert_sync_batchnorm"](timm_model())
    averaged = ModelEmaV3(model, decay=0.5)
    parallel = DistributedDataParallel(model)
    train(parallel, [torch.stack(images()).chunk(2)[rank]], sgd(parallel))
    averaged.update(model)
    layers = [m for m in model.modules() if isinstance(m, (nn.BatchNorm2d, nn.SyncBatchNorm))]
    assert layers and all(isinstance(layer, SyncBatchNorm) for layer in layers)
    return averaged.module.state_dict()


@pytest.mark.works("timm: the converter of `train.py --sync-bn`, `ModelEmaV3`")
def test_timm(two_ranks):
    from timm.utils import ModelEmaV3

    (code,) = lines("timm")
    model = timm_model()
    averaged = ModelEmaV3(model, decay=0.5)
    train(model, [torch.stack(images())], sgd(model))
    averaged.update(model)
    check(two_ranks.run(train_with_timm, code), averaged.module.state_dict())


def train_with_mmengine(rank, world_size, code, folder, by_config):
    from mmengine.model import BaseModel
    from mmengine.registry import DATASETS, MODELS, RUNNERS

    class Net(BaseModel):
        def __init__(self, data_preprocessor=None):
            super().__init__()
            self.layers = network()

        def forward(self, batch, mode):
            return {"loss": loss_of(self.layers(batch))}

    class Images(list):
        def __init__(self):
            super().__init__({"batch": image} for image in images())

    tell_rank(rank)
    MODELS.register_module("Net", module=Net, force=True)
    DATASETS.register_module("Images", module=Images, force=True)
    loader = {
        "dataset": {"type": "Images"},
        "batch_size": 2,
        "num_workers": 0,
        "sampler": {"type": "DefaultSampler", "shuffle": False},
        "collate_fn": {"type": "default_collate"},
    }
    options = {
        "work_dir": folder,
        "train_dataloader": loader,
        "train_cfg": {"by_epoch": True, "max_epochs": 1},
        "optim_wrapper": {"optimizer": {"type": "SGD", "lr": 0.1}},
        "default_hooks": {"checkpoint": None},
        "launcher": "pytorch",
    }
    on_cpu = {"model_wrapper_cfg": {"device_ids": None}}
    if by_config:
        run_lines(code)
        config = {"model": {"type": "Net"}, "runner_type": "SyncBNRunner", **options, **on_cpu}
        runner = RUNNERS.build(config)
    else:
        runner = run_lines(code, model=Net(), options={**options, "cfg": on_cpu})["runner"]
    model = runner.train().module
    assert isinstance(model.layers[1], SyncBatchNorm)
    return model.layers.state_dict()


@others_warn
@pytest.mark.works("MMEngine: `Runner` with a model, and from a config, in place of `sync_bn`")
@pytest.mark.parametrize("by_config", [False, True], ids=["model", "config"])
def test_mmengine(two_ranks, whole_batch, tmp_path, by_config):
    # MMEngine imports yapf, whose first import writes caches: of two ranks that import it at once,
    # one may read a half-written file.
    import yapf  # noqa: F401

    code = lines("MMEngine")[by_config]
    states = two_ranks.run(train_with_mmengine, code, str(tmp_path), by_config)
    check(states, whole_batch)


def train_with_lines(rank, world_size, heading):
    """Train the model after the lines under a heading have changed it or its builder."""

    class DetectionTrainer:
        def get_model(self, cfg=None, weights=None, verbose=True):
            return network()

    # The part of Ultralytics that the lines use.
    detect = types.ModuleType("ultralytics.models.yolo.detect")
    detect.DetectionTrainer = DetectionTrainer
    names = {"model": network(), "build_model": lambda config: network(), "config": {}}
    if heading.startswith("FSDP2"):
        names["mesh"] = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))
    (code,) = lines(heading)
    with mock.patch.dict(sys.modules, {detect.__name__: detect}):
        names = run_lines(code, **names)
    model = names["model"]
    if heading == "Ultralytics":
        model = names["SyncBatchNormTrainer"]().get_model(verbose=False)
    if not heading.startswith("FSDP2"):
        model = DistributedDataParallel(model)
    batches = [batch.chunk(2)[rank] for batch in DataLoader(images(), batch_size=4)]
    train(model, batches, sgd(model))
    assert any(isinstance(module, SyncBatchNorm) for module in model.modules())
    state = getattr(model, "module", model).state_dict()
    return {
        key: value.full_tensor() if isinstance(value, DTensor) else value
        for key, value in state.items()
    }


HEADINGS = (
    "torchvision's reference scripts",
    "Ultralytics",
    "Configs that name layers",
    "FSDP2 and torchtitan",
)


@others_warn
@pytest.mark.works("lines for torchvision's scripts, Ultralytics, configs, FSDP2 and torchtitan")
@pytest.mark.parametrize("heading", HEADINGS)
def test_lines_that_convert_the_model(two_ranks, whole_batch, heading):
    check(two_ranks.run(train_with_lines, heading), whole_batch)


def lightnings_switch():
    from pytorch_lightning.plugins.layer_sync import TorchSyncBatchNorm

    return TorchSyncBatchNorm().apply


def mmengines_switch():
    from mmengine.model import convert_sync_batchnorm

    return convert_sync_batchnorm


# torch's own warning: MMEngine imports its optimizers, which script functions.
@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("switch", [lightnings_switch, mmengines_switch])
def test_frameworks_switch_after_ours_gives_torchs_layers(switch):
    model = switch()(convert_sync_batchnorm(network()))
    assert type(model[1]) is nn.SyncBatchNorm
    assert isinstance(convert_sync_batchnorm(model)[1], SyncBatchNorm)


def test_lightning_refuses_its_switch_beside_our_plugin():
    from pytorch_lightning import Trainer
    from pytorch_lightning.utilities.exceptions import MisconfigurationException

    (code,) = lines("Lightning")
    code = code[: code.index("trainer = ")]
    plugin = run_lines(code)["SyncBatchNormPlugin"]()
    with pytest.raises(MisconfigurationException, match="Choose one or the other"):
        Trainer(plugins=[plugin], sync_batchnorm=True, accelerator="cpu")
