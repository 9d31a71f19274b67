"""Which rewrites a tower runs with. Each keeps the numbers but for the order of sums, and each can be switched off."""

from dataclasses import dataclass

__all__ = ["Rewrites"]


@dataclass(frozen=True, slots=True)
class Rewrites:
    """The rewrites of a tower's blocks. All are on by default, since all are exact but for the order of sums.

    Attributes:
        aligned_widths: Gate and up projections of a gated MLP become one product whose width is a multiple of 128, with
            zeros in what is added; so does the width that the down projection sums over. The module's parameters
            become views of the joined weights, so that they exist once and changes in place are seen.
        fused_rotary: Rotary positions of q and k in one pass over the packed projection.
        fused_norms: Additions to the residual stream in one pass with the norm behind them.
        fused_activations: Activations in the product's own last step where the GPU's library can, else in one pass.
    """

    aligned_widths: bool = True
    fused_rotary: bool = True
    fused_norms: bool = True
    fused_activations: bool = True

    @classmethod
    def none(cls) -> "Rewrites":
        """Every rewrite switched off."""
        return cls(False, False, False, False)
