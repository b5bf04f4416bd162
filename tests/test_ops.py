"""What all operators have in common: registration, errors, determinism."""

import pytest
import torch
from cases import DTYPES, make_input, reference_moments

from syncbn import ops

OPS = ["batch_norm_stats", "batch_norm_apply", "batch_norm_backward_reduce"]
OPS += ["batch_norm_backward_apply"]


def arguments(name, x, parameter_dtype=torch.float32):
    """Valid arguments of each operator for an input."""
    channels = x.size(1)
    totals = ops.batch_norm_stats(x.detach())
    mean, var = reference_moments(x.detach())
    vector = torch.ones(channels, dtype=parameter_dtype)
    running = (vector.clone(), vector.clone(), torch.tensor(0))
    sums = torch.ones(2 * channels, dtype=torch.float64)
    return {
        "batch_norm_stats": (x,),
        "batch_norm_apply": (x, totals, vector, vector.clone(), *running, None, 1e-5),
        "batch_norm_backward_reduce": (x.clone(), x, mean, var, vector),
        "batch_norm_backward_apply": (x.clone(), x, mean, var, vector, sums, totals[-1:].clone()),
    }[name]


def operator(name):
    return getattr(torch.ops.syncbn, name).default


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("name", OPS)
def test_opcheck(name, layout, dtype):
    x = make_input((3, 4, 5, 2), layout, dtype)
    # test_autograd_registration asks for an autograd kernel; ours is the Function around them.
    torch.library.opcheck(
        operator(name),
        arguments(name, x),
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
    )


@pytest.mark.parametrize("name", OPS)
def test_opcheck_without_optional_arguments(name):
    x = make_input((3, 4, 5), "contiguous", torch.float32)
    optional = {"batch_norm_apply": range(2, 7), "batch_norm_backward_reduce": [4]}
    optional["batch_norm_backward_apply"] = [4]
    args = list(arguments(name, x))
    for index in optional.get(name, []):
        args[index] = None
    if name == "batch_norm_apply":
        args[7] = 0.1
    torch.library.opcheck(
        operator(name), tuple(args), test_utils=("test_schema", "test_faketensor")
    )


@pytest.mark.parametrize("shape", [(3, 2, 131, 257), (129, 65), (64, 300, 7, 7)])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("name", OPS)
def test_same_bits_for_any_number_of_threads(name, layout, shape):
    if len(shape) == 2 and layout == "channels_last":
        layout = "contiguous"
    x = make_input(shape, layout, torch.float32)
    args = arguments(name, x)
    threads = torch.get_num_threads()
    results = []
    try:
        for n in (1, 2, 3, 7):
            torch.set_num_threads(n)
            torch.manual_seed(0)
            result = operator(name)(*args)
            results.append(result if isinstance(result, tuple) else (result,))
    finally:
        torch.set_num_threads(threads)
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


@pytest.mark.parametrize("name", OPS)
def test_meta_tensors_compute_shapes(name):
    args = arguments(name, make_input((3, 4, 5), "contiguous", torch.float32))
    meta = [a.to("meta") if isinstance(a, torch.Tensor) else a for a in args]
    real, shape_only = operator(name)(*args), operator(name)(*meta)
    real = real if isinstance(real, tuple) else (real,)
    shape_only = shape_only if isinstance(shape_only, tuple) else (shape_only,)
    for a, b in zip(real, shape_only, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype and a.stride() == b.stride()


def without(args, index, value):
    return (*args[:index], value, *args[index + 1 :])


X = make_input((3, 4, 5), "contiguous", torch.float32)
BAD_ARGUMENTS = [
    ("batch_norm_stats", 0, X.long(), "expected input of dtype float16, .* but got int64"),
    ("batch_norm_stats", 0, X[0, 0], "expected input to have at least 2 dimensions, but got 1"),
    ("batch_norm_stats", 0, X[:, :0], r"at least one channel, but got \[3, 0, 5\]"),
    ("batch_norm_stats", 0, X[:, :, ::2], "expected input to be contiguous or channels-last"),
    ("batch_norm_apply", 1, torch.zeros(8).double(), r"expected totals to have shape \[9\]"),
    ("batch_norm_apply", 1, torch.zeros(9), "expected totals to be contiguous float64"),
    ("batch_norm_apply", 2, torch.ones(3), r"expected weight to have shape \[4\], but got \[3\]"),
    ("batch_norm_apply", 3, torch.ones(4).half(), "expected bias to have dtype float32"),
    ("batch_norm_apply", 4, torch.ones(4, 1), "expected running_mean to have shape"),
    ("batch_norm_apply", 5, None, "both of running_mean and running_var or neither"),
    ("batch_norm_apply", 6, torch.tensor(0.0), "expected num_batches_tracked to be one int64"),
    ("batch_norm_apply", 6, None, "expected num_batches_tracked with a momentum of None"),
    ("batch_norm_backward_reduce", 0, X.double(), "grad_output to have dtype float32, but got"),
    ("batch_norm_backward_reduce", 0, X[:2], r"grad_output to have shape \[3, 4, 5\], but got"),
    (
        "batch_norm_backward_reduce",
        0,
        X.transpose(1, 2).contiguous().transpose(1, 2),
        "expected grad_output to have the layout of input",
    ),
    ("batch_norm_backward_reduce", 2, torch.zeros(4), "expected mean to be contiguous float64"),
    ("batch_norm_backward_apply", 5, torch.zeros(4).double(), r"sums to have shape \[8\]"),
    ("batch_norm_backward_apply", 6, torch.zeros(2).double(), r"count to have shape \[1\]"),
]


@pytest.mark.parametrize(("name", "index", "value", "message"), BAD_ARGUMENTS)
def test_bad_argument_is_named(name, index, value, message):
    args = without(arguments(name, X), index, value)
    with pytest.raises(RuntimeError, match=f"^syncbn::{name}: .*{message}") as error:
        operator(name)(*args)
    assert ".cpp" not in str(error.value) and ".h:" not in str(error.value)
