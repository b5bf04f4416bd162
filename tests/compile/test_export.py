"""Export and fusion for inference: models in evaluation mode hold torch's own batch norm."""

import pytest
import torch
from support.cases import make_input
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from syncbn import SyncBatchNorm, convert_sync_batchnorm, revert_sync_batchnorm


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    model = convert_sync_batchnorm(model)
    model(batch())
    return model.eval()


def batch():
    return make_input((2, 3, 6, 6), "contiguous", torch.float32)


def assert_fused(actual, expected):
    # the convolution's weights were rounded once more
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


# torch's own warning: 2.11 copies its tree specifications through a deprecated class.
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
@pytest.mark.works("torch.export in evaluation: plain batch norm")
@pytest.mark.parametrize("strict", [False, True])
def test_exported_program_has_torchs_batch_norm(strict):
    model = build()
    program = torch.export.export(model, (batch(),), strict=strict)
    calls = [str(n.target) for n in program.graph.nodes if n.op == "call_function"]
    assert calls.count("aten.batch_norm.default") == 2
    assert not any("syncbn" in call for call in calls)
    assert torch.equal(program.module()(batch()), model(batch()))


# torch's own warnings: as above, and of functions that the exporter of 2.11 calls.
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
@pytest.mark.works("torch.onnx.export(dynamo=True) in evaluation: BatchNormalization")
def test_onnx_has_batch_normalization():
    model = build()
    program = torch.onnx.export(model, (batch(),), dynamo=True, verbose=False)
    nodes = list(program.model.graph)
    # The exporter itself has fused the second one with the convolution.
    assert [node.op_type for node in nodes] == ["BatchNormalization", "Conv", "Relu"]
    assert all(node.domain == "" for node in nodes)
    (actual,) = program.call_reference(batch())
    assert_fused(actual, model(batch()))


@pytest.mark.works("torch.fx.symbolic_trace, and revert_sync_batchnorm before or after it")
@pytest.mark.parametrize("built", [False, True])  # as SyncBatchNorm, not converted
def test_layers_of_a_symbolic_trace_can_be_reverted(built):
    model = build()
    if built:
        model[2] = SyncBatchNorm(4).eval()
    expected = model(batch())
    traced = torch.fx.symbolic_trace(model)
    assert torch.equal(traced(batch()), expected)
    reverted = revert_sync_batchnorm(traced)
    assert type(reverted.get_submodule("0")) is nn.BatchNorm2d
    assert not any(isinstance(module, SyncBatchNorm) for module in reverted.modules())
    again = torch.fx.symbolic_trace(revert_sync_batchnorm(model))
    for graph in (reverted, again):
        calls = [node.target for node in graph.graph.nodes if node.op == "call_module"]
        assert calls == ["0", "1", "2", "3"] or (built and calls == ["0", "1", "3"])
        assert torch.equal(graph(batch()), expected)


@pytest.mark.works("torch.nn.utils.fusion.fuse_conv_bn_eval")
@pytest.mark.parametrize("revert", [False, True])
def test_convolution_fuses_with_the_layer(revert):
    model = build()
    expected = model(batch())
    if revert:
        model = revert_sync_batchnorm(model)
    fused = nn.Sequential(model[0], fuse_conv_bn_eval(model[1], model[2]), model[3])
    assert_fused(fused(batch()), expected)


@pytest.mark.works("torch.fx.experimental.optimization.fuse, after revert_sync_batchnorm")
def test_fx_fuses_after_revert():
    from torch.fx.experimental import optimization

    model = build()
    expected = model(batch())
    fused = optimization.fuse(revert_sync_batchnorm(model))
    kinds = [type(module) for module in fused.modules()]
    assert kinds.count(nn.BatchNorm2d) == 1 and kinds.count(nn.Conv2d) == 1
    assert_fused(fused(batch()), expected)
    # layers that were not reverted stay unchanged
    model = build()
    assert_fused(optimization.fuse(model)(batch()), expected)


# torch's own warning: scripting and tracing are deprecated.
scripting = pytest.mark.filterwarnings("ignore:`torch.jit")


@scripting
@pytest.mark.parametrize("built", [False, True])
def test_script_takes_a_reverted_model(built):
    model = build()
    if built:
        model[2] = SyncBatchNorm(4).eval()
    expected = model(batch())
    assert torch.equal(torch.jit.script(revert_sync_batchnorm(model))(batch()), expected)


class Doubled(SyncBatchNorm):
    def forward(self, input):
        return 2 * super().forward(input)


@scripting
@pytest.mark.parametrize("training", [False, True])  # a scripted module can be set to train()
@pytest.mark.parametrize("layer", [SyncBatchNorm, Doubled])
def test_script_is_an_error_that_says_what_to_do(layer, training):
    words = "TorchScript cannot hold a SyncBatchNorm layer; call syncbn.revert_sync_batchnorm first"
    for model in (layer(3), nn.Sequential(nn.ReLU(), nn.Sequential(layer(3)))):
        with pytest.raises(NotImplementedError, match=rf"^{words}$"):
            torch.jit.script(model.train(training))
    convert_sync_batchnorm(model)
    with pytest.raises(NotImplementedError, match=rf"^{words} \[layer '1\.0'\]$"):
        torch.jit.script(model)


@scripting
def test_trace_of_evaluation_is_torchs_batch_norm_and_can_be_scripted():
    model = build()
    expected = model(batch())
    traced = torch.jit.trace(model, batch())
    assert torch.equal(traced(batch()), expected)
    assert str(traced.inlined_graph).count("aten::batch_norm") == 2
    assert torch.equal(torch.jit.script(nn.Sequential(traced))(batch()), expected)
