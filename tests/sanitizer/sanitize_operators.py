"""Runs every CUDA operator on small inputs; test_sanitizer.py runs it under compute-sanitizer.

With ``--plant memcheck`` or ``--plant racecheck`` it runs a kernel that is wrong instead, to see
that the tool finds it.
"""

import argparse

import torch
from support.cases import EMPTY_SHAPES, OPS, SHAPES, arguments, layouts, make_input, operator

# Shapes whose kernels take long under the tools are left to the other tests.
SMALL_SHAPES = [shape for shape in SHAPES if torch.Size(shape).numel() < 50_000]
SPLIT_SHAPES = [(64, 2, 28, 28), (1030, 24)]  # each channel over several blocks
DTYPES = [torch.float32, torch.bfloat16, torch.float64]  # float16 uses bfloat16's code

# Named as ours are, because only those are checked.
PLANTED = {
    "memcheck": """
extern "C" __global__ void syncbn_planted(float* values) { values[64] = 1; }
""",
    "racecheck": """
extern "C" __global__ void syncbn_planted(float* values) {
  __shared__ float shared[64];
  shared[threadIdx.x] = threadIdx.x;
  values[threadIdx.x] = shared[63 - threadIdx.x];  // no barrier before it
}
""",
}


def run_operators() -> int:
    calls = 0
    for shape in (*SMALL_SHAPES, *SPLIT_SHAPES, *EMPTY_SHAPES):
        for layout in layouts(shape):
            for dtype in DTYPES:
                x = make_input(shape, layout, dtype)
                # The second starts one element into its storage: no vector is aligned.
                moved = torch.empty(x.numel() + 1, dtype=dtype)[1:]
                moved = moved.as_strided(x.shape, x.stride(), 1).copy_(x)
                for tensor in (x, moved):
                    for name in OPS:
                        operator(name)(*arguments(name, tensor))
                        calls += 1
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plant", choices=PLANTED)
    args = parser.parse_args()
    torch.set_default_device("cuda")
    if args.plant:
        kernel = torch.cuda._compile_kernel(PLANTED[args.plant], "syncbn_planted")
        kernel(grid=(1, 1, 1), block=(64, 1, 1), args=[torch.zeros(64)])
    else:
        print(f"{run_operators()} calls of operators")
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
