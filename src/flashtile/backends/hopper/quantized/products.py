"""The output of the Hopper forward of 8-bit tensors: products of probabilities and values, summed in float32."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from flashtile.backends.hopper.device.parts import also, box_of
from flashtile.backends.hopper.quantized.inline_ptx import in_place, plus


@gluon.jit
def zero_parts(M: gl.constexpr, DIM_V: gl.constexpr, WIDTH: gl.constexpr):
    """Accumulators [M, DIM_V] in tensors of WIDTH columns, 0: a product beside them must fit the registers."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 32])
    accs = ()
    for _ in gl.static_range(DIM_V // WIDTH):
        accs = also(accs, gl.zeros([M, WIDTH], gl.float32, layout))
    return accs


@gluon.jit
def start_products(probs, values, accs, factor):
    """(accs, t): the products for all accumulators but the last one, added; the last one, t, under way."""
    t = start_product(probs, box_of(values, 0, accs[0].shape[1], 0), accs[0])
    done = ()
    for i in gl.static_range(1, len(accs)):
        t = warpgroup_mma_wait(0, deps=[t])
        following = start_product(probs, box_of(values, i * accs[0].shape[1], accs[0].shape[1], 0), accs[i])
        done = also(done, in_place(plus(accs[i - 1], factor, t)))
        t = following
    return also(done, accs[len(accs) - 1]), t


@gluon.jit
def start_product(probs, values, like):
    """Starts the product of probabilities with values, from 0."""
    layout: gl.constexpr = like.type.layout
    zeros = gl.zeros([like.shape[0], like.shape[1]], gl.float32, layout)
    return warpgroup_mma(probs, values.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def add_product(t, accs, factor):
    """The accumulators with t added to the last one."""
    LAST: gl.constexpr = len(accs) - 1
    done = ()
    for i in gl.static_range(LAST):
        done = also(done, accs[i])
    return also(done, plus(accs[LAST], factor, t))
