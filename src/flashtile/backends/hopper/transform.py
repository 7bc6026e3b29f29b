"""How products of queries and keys become exponents of 2."""

# Annotations are read by Triton's aggregate as the types they are, so they must not be turned into strings.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashtile.backends.hopper.gluon_compat import aggregate
from flashtile.backends.vocab import quick_scores


@aggregate
class Transform:
    """The numbers of ``launch.scales``, and what else shapes the code of a step; the same for every block."""

    scale_log2: gl.tensor
    softcap: gl.tensor
    prescale: gl.tensor
    has_softcap: gl.constexpr
    scale_first: gl.constexpr

    @gluon.jit
    def scores(self, s):
        """Products as scores that ``scale_log2`` turns into exponents."""
        if self.has_softcap:
            s = quick_scores.softcap(s, self.softcap, self.prescale)
        if self.scale_first:
            s = s * self.prescale
        return s
