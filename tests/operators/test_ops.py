"""Properties of all operators: registration, errors, determinism."""

import pytest
import torch
from support.cases import COMPILED_OPS, MASKED_OPS, OPS, arguments, make_input, operator


# Fake kernels treat dtype and layout independently: each occurs once.
@pytest.mark.usefixtures("each_device")
@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        ("contiguous", torch.float32),
        ("channels_last", torch.bfloat16),
        ("contiguous", torch.float64),
    ],
)
@pytest.mark.parametrize("name", OPS + COMPILED_OPS)
def test_opcheck(name, layout, dtype):
    x = make_input((3, 4, 5, 2), layout, dtype)
    # test_autograd_registration asks for an autograd kernel; ours is the Function around them.
    torch.library.opcheck(
        operator(name),
        arguments(name, x),
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
    )


@pytest.mark.usefixtures("each_device")
@pytest.mark.parametrize("name", OPS + COMPILED_OPS)
def test_opcheck_without_optional_arguments(name):
    x = make_input((3, 4, 5), "contiguous", torch.float32)
    optional = {"batch_norm_apply": range(2, 7), "batch_norm_backward_apply": [4]}
    optional |= {"batch_norm_forward": range(1, 6), "batch_norm_backward": [4]}
    optional |= {"compiled_forward": range(1, 6)}
    args = list(arguments(name, x))
    for index in optional.get(name, []):
        args[index] = None
    momentum = {"batch_norm_apply": 7, "batch_norm_forward": 6}.get(name)
    if momentum is not None:
        args[momentum] = 0.1
    torch.library.opcheck(
        operator(name), tuple(args), test_utils=("test_schema", "test_faketensor")
    )


@pytest.mark.usefixtures("each_device")
@pytest.mark.parametrize("name", OPS)
def test_results_require_no_gradient(name):
    x = make_input((4, 3, 5), "contiguous", torch.float32).requires_grad_()
    results = operator(name)(*arguments(name, x))
    for result in (results,) if isinstance(results, torch.Tensor) else results:
        assert not result.requires_grad


@pytest.mark.usefixtures("each_device")
@pytest.mark.parametrize("name", OPS)
def test_tensors_that_are_read_keep_sharing_their_memory(name):
    """torch's copy-on-write tensors."""
    x = make_input((4, 3, 5), "contiguous", torch.float32)
    args = [torch._lazy_clone(a) if torch.is_tensor(a) else a for a in arguments(name, x)]
    operator(name)(*args)
    written = {"batch_norm_apply": (4, 5, 6, 14), "batch_norm_forward": (3, 4, 5, 11)}
    for i, arg in enumerate(args):
        if torch.is_tensor(arg):
            assert torch._C._is_cow_tensor(arg) == (i not in written.get(name.split()[0], ())), i


@pytest.mark.parametrize("shape", [(3, 2, 131, 257), (129, 65), (64, 300, 7, 7)])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("name", OPS + MASKED_OPS)
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


@pytest.mark.usefixtures("each_device")
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
# Made from the input, on its device.
BAD_ARGUMENTS = [
    ("batch_norm_stats", 0, lambda x: x.long(), "input of dtype float16, .* but got int64"),
    ("batch_norm_stats", 0, lambda x: x[0, 0], r"expected at least 2D input \(got 1D input\)"),
    ("batch_norm_stats", 0, lambda x: x[:, :0], "number of input channels should be non-zero"),
    ("batch_norm_stats", 0, lambda x: x[:, :, ::2], "input to be contiguous or channels-last"),
    ("batch_norm_apply", 1, lambda x: double(x, 8), r"expected totals to have shape \[9\]"),
    ("batch_norm_apply", 1, lambda x: double(x, 9).float(), "totals to be contiguous float64"),
    ("batch_norm_apply", 2, lambda x: x[0, 0, :3], r"weight to have shape \[4\], but got \[3\]"),
    ("batch_norm_apply", 3, lambda x: x[0, :, 0].half(), "expected bias to have dtype float32"),
    ("batch_norm_apply", 4, lambda x: x[0, :, :1], "expected running_mean to have shape"),
    ("batch_norm_apply", 4, lambda x: x[0, 0, :1].expand(4), "running_mean to have memory for"),
    ("batch_norm_apply", 5, lambda x: x[0, 0, :1].expand(4), "running_var to have memory for"),
    ("batch_norm_apply", 5, lambda x: None, "both of running_mean and running_var or neither"),
    ("batch_norm_apply", 6, lambda x: x[0, 0, 0], "num_batches_tracked to be int64"),
    ("batch_norm_apply", 6, lambda x: None, "momentum to be a number, but got NoneType"),
    ("batch_norm_backward_reduce", 0, lambda x: x.double(), "grad_output to have dtype float32"),
    ("batch_norm_backward_reduce", 0, lambda x: x[:2], r"grad_output to have shape \[3, 4, 5\]"),
    (
        "batch_norm_backward_reduce",
        0,
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        "expected grad_output to have the layout of input",
    ),
    ("batch_norm_backward_reduce", 2, lambda x: x[0, :, 0], "mean to be contiguous float64"),
    ("batch_norm_backward_apply", 5, lambda x: double(x, 4), r"sums to have shape \[8\]"),
    ("batch_norm_backward_apply", 6, lambda x: double(x, 2), r"count to have shape \[1\]"),
]


@pytest.mark.usefixtures("each_device")
@pytest.mark.parametrize("name", OPS)
def test_tensor_without_memory_is_named(name):
    """Its storage was resized; a read would end the process or a CUDA context."""
    for index, tensor in enumerate(arguments(name, X)):
        for num_bytes in (0, 1):
            if not isinstance(tensor, torch.Tensor):
                continue
            args = arguments(name, X.clone().to(torch.get_default_device()))
            args[index].untyped_storage().resize_(num_bytes)
            with pytest.raises(RuntimeError, match=rf"memory for its values.* {num_bytes} bytes$"):
                operator(name)(*args)


@pytest.mark.parametrize("name", OPS + MASKED_OPS)
def test_meta_tensor_among_others_is_an_error(name):
    args = arguments(name, X)
    indexes = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor)]
    for index in indexes[1:]:
        words = (
            r"on one device, but got \['cpu', 'meta'\]|on cpu, the device of input, but got meta"
        )
        with pytest.raises((RuntimeError, ValueError), match=words):
            operator(name)(*without(args, index, args[index].to("meta")))


def double(x, size):
    return x.new_zeros(size, dtype=torch.float64)


@pytest.mark.parametrize(("name", "index", "make", "message"), BAD_ARGUMENTS)
def test_bad_argument_is_named(each_device, name, index, make, message):
    x = X.to(each_device)
    args = without(arguments(name, x), index, make(x))
    with pytest.raises(RuntimeError, match=message) as error:
        operator(name)(*args)
    assert ".cpp" not in str(error.value) and ".h:" not in str(error.value)


@pytest.mark.cuda
@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize("name", ["batch_norm_stats", "batch_norm_backward_reduce"])
def test_stream_of_each_thread(name):
    """It is another stream in each thread, so a launch there allocates its counters."""
    args = arguments(name, make_input((64, 4, 28, 28), "contiguous", torch.float32))
    expected = operator(name)(*args)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.ExternalStream(2)):  # cudaStreamPerThread
        results = operator(name)(*args)
    torch.cuda.synchronize()
    torch.testing.assert_close(results, expected, rtol=0.0, atol=0.0)
