"""An energy model trained through its forces: the loss has a gradient in it, so training takes second derivatives.

Run it: python examples/10_forces.py
"""

import torch
from torch import Tensor, nn

import flashtile


class Energy(nn.Module):
    """The energy of atoms: one layer of attention over their distances to a few points."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.points = nn.Parameter(torch.randn(width, 3))
        self.mix, self.qkv = nn.Linear(width, width), nn.Linear(width, 3 * width)
        self.last = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1))

    def forward(self, places: Tensor) -> Tensor:
        """Energies (batch,) of atoms at these places (batch, atoms, 3)."""
        x = self.mix(torch.exp(-torch.cdist(places, self.points.expand(len(places), -1, -1)).square() / 4))
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        return self.last(x + flashtile.attention(q, k, v).flatten(2)).sum(dim=(1, 2))


def true_energy(places: Tensor) -> Tensor:
    """Each pair of atoms attracts at a distance and repels when near; a well keeps them together."""
    near = torch.exp(-(places[:, :, None] - places[:, None]).square().sum(-1))
    return 0.5 * near.sum(dim=(1, 2)) + 0.1 * places.square().sum(dim=(1, 2))


def forces(energy: Tensor, places: Tensor, create_graph: bool = False) -> Tensor:
    return -torch.autograd.grad(energy.sum(), places, create_graph=create_graph)[0]


def main() -> None:
    torch.manual_seed(0)
    model = Energy()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    first = None
    for step in range(201):
        places = torch.randn(16, 12, 3, requires_grad=True)
        wanted = forces(true_energy(places), places)
        found = forces(model(places), places, create_graph=True)
        loss = (found - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        first = first or loss.item()
        if step % 50 == 0:
            print(f"step {step:3d}: error of the forces {loss.item():.4f}")
    print(f"the error fell to {loss.item() / first:.2f} of the first")


if __name__ == "__main__":
    main()
