"""nn.WindowSoftmax inside a WindowAttention that keeps explicit scores."""

import pytest
import torch
from torch import nn

from fastswin.nn import WindowSoftmax


class ExplicitWindowAttention(nn.Module):
    """The official module's computation; ``fused`` takes the documented three-line change."""

    def __init__(self, dim, tokens, heads, fused):
        super().__init__()
        self.heads, self.fused = heads, fused
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.bias = nn.Parameter(torch.randn(heads, tokens, tokens))
        self.softmax = WindowSoftmax(impl="triton") if fused else nn.Softmax(dim=-1)

    def forward(self, x, mask=None):
        windows, n, dim = x.shape
        qkv = self.qkv(x).reshape(windows, n, 3, self.heads, dim // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attn = q * (dim // self.heads) ** -0.5 @ k.transpose(-2, -1)
        if self.fused:
            attn = self.softmax(attn, self.bias, mask)
        else:
            attn = attn + self.bias[None]
            if mask is not None:
                count = mask.shape[0]
                attn = attn.view(windows // count, count, self.heads, n, n) + mask[None, :, None]
                attn = attn.view(windows, self.heads, n, n)
            attn = self.softmax(attn)
        return self.proj((attn @ v).transpose(1, 2).reshape(windows, n, dim))


@pytest.mark.parametrize("masked", [False, True], ids=["plain", "shift mask"])
def test_equals_the_explicit_module_forward_and_backward(masked, randn, device):
    torch.manual_seed(0)
    plain = ExplicitWindowAttention(12, 9, 3, fused=False).to(device)
    fused = ExplicitWindowAttention(12, 9, 3, fused=True).to(device)
    fused.load_state_dict(plain.state_dict())
    x, grad = randn(8, 9, 12), randn(8, 9, 12)
    mask = (randn(4, 9, 9) > 0.5) * -100.0 if masked else None
    for module in (plain, fused):
        module(x, mask).backward(grad)
    assert torch.allclose(fused(x, mask), plain(x, mask), atol=1e-5)
    for (name, a), b in zip(fused.named_parameters(), plain.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, atol=1e-4), name


def test_in_timm_window_attention(device):
    swin = pytest.importorskip("timm.models.swin_transformer", reason="timm is an extra")

    class Fused(swin.WindowAttention):
        """timm's forward with bias, mask and softmax in one call."""

        def forward(self, x, mask=None):
            windows, n, _ = x.shape
            qkv = self.qkv(x).reshape(windows, n, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
            q, k, v = qkv.unbind(0)
            attn = q * self.scale @ k.transpose(-2, -1)
            attn = self.softmax(attn, self._get_rel_pos_bias(), mask)
            x = (self.attn_drop(attn) @ v).transpose(1, 2).reshape(windows, n, -1)
            return self.proj_drop(self.proj(x))

    torch.manual_seed(0)
    plain = swin.WindowAttention(12, 3, window_size=(3, 3)).to(device).eval()
    nn.init.normal_(plain.relative_position_bias_table)
    fused = Fused(12, 3, window_size=(3, 3)).to(device).eval()
    fused.load_state_dict(plain.state_dict())
    fused.softmax = WindowSoftmax()
    x = torch.randn(8, 9, 12, device=device)
    mask = torch.randint(0, 2, (4, 9, 9), device=device) * -100.0
    assert torch.allclose(fused(x, mask), plain(x, mask), atol=1e-5)


def test_bare_call_is_a_plain_softmax(randn):
    scores = randn(2, 5)
    assert torch.allclose(WindowSoftmax()(scores), scores.softmax(-1), atol=1e-6)
    assert WindowSoftmax().state_dict() == {}
