"""Two threads that train layers at once, under ThreadSanitizer; ``tools/maintain.mk`` runs it.

With ``--race`` both train one layer, whose running statistics they must not share.
"""

import os
import sys
import threading

import torch

import syncbn

# In rows and in planes; over several threads of torch, and too small for that.
SHAPES = [(32, 16, 40, 40), (512, 96), (4, 3, 5, 7)]
LAYOUTS = [torch.contiguous_format, torch.channels_last]
DTYPES = [torch.float32, torch.bfloat16]
start = threading.Barrier(2)


def train(layers):
    for layer, shape in layers:
        for dtype in DTYPES:
            for layout in LAYOUTS[: len(shape) - 2 or 1]:
                x = torch.randn(shape, dtype=dtype).contiguous(memory_format=layout)
                x.requires_grad_()
                start.wait()
                for _ in range(3):
                    torch.autograd.grad(layer(x).sum(), [x, *layer.parameters()])


def layers(**options):
    return [(syncbn.SyncBatchNorm(shape[1], **options), shape) for shape in SHAPES]


def run_both(first, second):
    threads = [threading.Thread(target=train, args=(own,)) for own in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def end(failure):
    """End the process: the other thread would wait for this one."""
    sys.excepthook(failure.exc_type, failure.exc_value, failure.exc_traceback)
    os._exit(1)


threading.excepthook = end
torch.set_num_threads(2)
if "--race" in sys.argv:
    shared = layers()
    run_both(shared, shared)
else:
    run_both(layers(), layers())
    shared = layers(track_running_stats=False)
    run_both(shared, shared)
